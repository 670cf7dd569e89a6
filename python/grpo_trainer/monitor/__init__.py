"""What a person sees and keeps of a run."""
