"""What is asked for: the contract's files and variables, the code, the machine; read into a frozen `Job`."""
