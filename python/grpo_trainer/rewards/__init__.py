"""Rewards that can be verified."""
