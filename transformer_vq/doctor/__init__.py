"""`tvq doctor`: check this installation on this device, and report what was found."""
