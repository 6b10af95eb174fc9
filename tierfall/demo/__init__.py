"""The demo: a real training run that is killed in the middle of a flush and goes on as if nothing had been.

It owns a small model, its data, a trainer process and the story. It uses tierfall as any user does, reads the event log
of its run, and looks at tiers from outside by ``tierfall.ops.reader``. The command line imports it, and tests its S3
server.
"""
