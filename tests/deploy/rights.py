"""What the roles may not do on Redis, for the servers that are here and for those in containers."""

C = "moesaic:{default}:"

# What a role writes by itself, and what would harm others.
OWN = {
    role: ("SET", f"{C}worker:{role}-x", "1", "EX", "1")
    for role in ("scheduler", "gateway", "attention", "expert")
}
_WORKERS = [
    ("SET", f"{C}placement:current", "9"),
    ("SET", f"{C}placement:epoch", "9"),
    ("DEL", f"{C}placement:current"),
    ("XADD", f"{C}ctl:placement", "*", "t", "x"),
    ("XADD", f"{C}ctl:decisions", "*", "t", "x"),
    ("SET", f"{C}brownout:policy", "9"),
    ("XADD", f"{C}ctl:brownout", "*", "t", "x"),
    ("SET", f"{C}scaling:policy", "9"),
    ("SET", f"{C}scaling:action", "9"),
    ("SET", f"{C}leader:scheduler", "me"),
    ("SREM", f"{C}workers", "expert-0"),  # of anyone: they would vanish from all views
]
_OTHERS = {
    "gateway": [
        ("XADD", f"{C}ctl:activations", "*", "t", "x"),
        ("XADD", f"{C}ctl:latency", "*", "t", "x"),
        ("XADD", f"{C}ctl:load", "*", "t", "x"),
    ],
    "attention": [("XADD", f"{C}ctl:activations", "*", "t", "x")],
    "expert": [
        ("GET", f"{C}worker:gateway-x"),
        ("XADD", f"{C}ctl:latency", "*", "t", "x"),
        ("SMEMBERS", f"{C}workers"),
        ("XREVRANGE", f"{C}ctl:activations", "+", "-"),
    ],
    "scheduler": [
        ("XADD", f"{C}ctl:activations", "*", "t", "x"),
        ("XADD", f"{C}ctl:load", "*", "t", "x"),
    ],
}
FOREIGN = {
    role: [
        *(("SET", f"{C}worker:{other}-x", "1") for other in OWN if other != role),
        *(("SET", f"{C}generation:{other}-x", "1") for other in OWN if other != role),
        *(_WORKERS if role != "scheduler" else ()),
        *_OTHERS[role],
        ("SET", "other", "1"),
    ]
    for role in OWN
}
# Of no role, on any key.
DANGEROUS = [
    *(("DEL", f"{C}{key}") for key in ("workers", "ctl:registry", "ctl:activations")),
    *(("SET", f"{C}{key}", "x") for key in ("workers", "ctl:registry", "ctl:activations")),
    *(("UNLINK", f"{C}{key}") for key in ("workers", "worker:expert-x")),
    ("XTRIM", f"{C}ctl:activations", "MAXLEN", "0"),
    ("XDEL", f"{C}ctl:registry", "1-1"),
    ("RENAME", f"{C}worker:expert-x", f"{C}worker:expert-y"),
    ("EXPIRE", f"{C}workers", "0"),
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("CONFIG", "GET", "*"),
    ("EVAL", "return 1", "0"),
    ("ACL", "LIST"),
    ("MONITOR",),
    ("CLIENT", "LIST"),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("REPLICAOF", "127.0.0.1", "1"),
    ("SHUTDOWN", "NOSAVE"),
]
