"""What tests have measured, for the end of the report."""

DESCRIPTORS = "descriptors of one transfer"
ROUTERS = "routers before two prefill servers of which one dies"
FAULTS = "faults: how requests have ended whose cache could not be read"
TABLES: dict[str, list[tuple[object, ...]]] = {
    DESCRIPTORS: [],
    ROUTERS: [("router", "requests that failed before five in a row did not")],
    FAULTS: [("fault", "policy", "reason", "end", "seconds", "bound")],
}
