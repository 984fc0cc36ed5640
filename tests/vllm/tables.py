"""What tests have measured, for the end of the report."""

DESCRIPTORS = "descriptors of one transfer"
FAULTS = "faults: how requests have ended whose cache could not be read"
TABLES: dict[str, list[tuple[object, ...]]] = {
    DESCRIPTORS: [],
    FAULTS: [("fault", "policy", "reason", "end", "seconds", "bound")],
}
