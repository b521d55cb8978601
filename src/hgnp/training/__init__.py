"""The parts of a run. `hgnp.train.prune` puts them together."""
