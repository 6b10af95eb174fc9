"""Another node's memory as a backend: objects that a process of that node keeps for this one, over TCP."""
