"""Background tools: any tool as a process. `engine` registers and begins one, `work` makes its attempts."""
