"""The reader's side of the TCP data plane of the release before, for producers that publish no stretches."""
