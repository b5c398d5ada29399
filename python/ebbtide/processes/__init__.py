"""Several processes of one user on one GPU: what each holds and waits for, and a queue for room."""
