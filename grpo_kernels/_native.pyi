def supported_instruction_sets() -> list[str]: ...
def anchored_tile(
    tile: int,
    rows: int,
    cols: int,
    stride: int,
    first_row: int,
    inverse_temperature: float,
    offset: int,
    targets: int,
    sum: int,
    weighted_sum: int,
    threads: int,
    instruction_set: str | None = None,
) -> None: ...
