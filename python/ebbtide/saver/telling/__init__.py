"""What operations tell of themselves: a log line when they are over, progress while they run."""
