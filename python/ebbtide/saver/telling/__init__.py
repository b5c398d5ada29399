"""The output of operations: a log line when they are over, progress while they run."""
