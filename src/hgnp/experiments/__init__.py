"""The paper's experiments: its networks and its data, what is run on them and what is made of the runs."""
