"""What is known about versions: how two of them compare, what they are called, which are kept. No torch, no broker."""
