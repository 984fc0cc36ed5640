"""What tests have measured, for the end of the report."""

DESCRIPTORS = "descriptors of one transfer"
TABLES: dict[str, list[tuple[object, ...]]] = {DESCRIPTORS: []}
