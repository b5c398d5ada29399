"""What lies on the host passes through the device in pieces where it is used, and stays where it is."""
