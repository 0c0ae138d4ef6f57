"""What a config will need and how fast it will run, before it is launched: closed forms, and the real code on fake tensors."""
