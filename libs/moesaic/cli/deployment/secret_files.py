#!/usr/bin/env python3
"""The secrets that compose.yaml gives to the services: ``deploy/secrets/``, one file each.

    deploy/make_secrets.py [DIRECTORY]

Existing files stay as they are, so a second run changes nothing. To get a new secret, remove its file (for one of
Redis: its URL and ``redis_users``) and restart the services. Needs Python only. ``moesaic deploy compose`` makes the
same files for the hosts of a cluster.
"""

import hashlib
import secrets
import sys
from pathlib import Path
from urllib.parse import quote, urlsplit

ROLES = ("scheduler", "gateway", "attention", "expert", "edge-agent")
REDIS = "redis:6379/0"  # as compose.yaml names it

# Commands without keys.
EVERYONE = "+ping +client|setname +select +unwatch +multi +exec +discard"
# Each pair is a list of commands and the keys on which they are allowed: %R~ is read, %W~ written. No role has a
# command that empties, renames, scans or administers. Only the scheduler removes ids from the index of workers.
# Within its patterns a role may destroy data, but not forge it: all data is sealed with the cluster's secret.
READ, STREAM = "+strlen +get +mget", "+xread +xrevrange"
DOCUMENTS = f"{READ} +watch +set +del"
# Entries of a dead-letter stream. A full stream is emptied; the id of an entry shows whether another reader kept it.
LETTERS = "+xadd +xrange +del"
OWN = [
    (DOCUMENTS, "~{c}worker:{role}-* ~{c}generation:{role}-*"),
    ("+sadd", "%W~{c}workers"),
    ("+xadd", "%W~{c}ctl:registry"),
    ("+xadd +del", "%W~{c}dlq:documents"),
]
LOOKS_AT_WORKERS = [
    ("+sscan", "%R~{c}workers"),
    (READ, "%R~{c}worker:*"),
    (STREAM, "%R~{c}ctl:registry"),
    (LETTERS, "~{c}dlq:ctl:registry"),
]
LOOKS_AT_PLACEMENTS = [
    (READ, "%R~{c}placement:*"),
    (STREAM, "%R~{c}ctl:placement"),
    (LETTERS, "~{c}dlq:ctl:placement"),
]
LOOKS_AT_BROWNOUT = [
    (READ, "%R~{c}brownout:*"),
    (STREAM, "%R~{c}ctl:brownout"),
    (LETTERS, "~{c}dlq:ctl:brownout"),
]
LEADS = [
    (DOCUMENTS, "~{c}placement:* ~{c}brownout:* ~{c}scaling:* ~{c}leader:scheduler"),
    ("+pttl", "%R~{c}leader:scheduler"),
    ("+srem", "%W~{c}workers"),
    ("+xadd", "%W~{c}ctl:placement %W~{c}ctl:brownout"),
    ("+xadd", "~{c}ctl:decisions"),
    (STREAM, "%R~{c}ctl:activations %R~{c}ctl:profiles %R~{c}ctl:latency %R~{c}ctl:decisions"),
    (STREAM, "%R~{c}ctl:load"),
    (LETTERS, "~{c}dlq:ctl:*"),
]
# The digest of the cluster's weights: all workers write it.
AGREES = [(f"{READ} +watch +set", "~{c}weights")]
RIGHTS = {
    "scheduler": [*OWN, *LOOKS_AT_WORKERS, *LOOKS_AT_PLACEMENTS, *LEADS],
    "gateway": [*OWN, *LOOKS_AT_WORKERS, *LOOKS_AT_PLACEMENTS],
    "attention": [
        *OWN,
        *AGREES,
        *LOOKS_AT_WORKERS,
        *LOOKS_AT_PLACEMENTS,
        *LOOKS_AT_BROWNOUT,
        ("+xadd", "%W~{c}ctl:latency %W~{c}ctl:load"),
    ],
    "expert": [
        *OWN,
        *AGREES,
        *LOOKS_AT_PLACEMENTS,  # a standby worker sees there whether it is needed
        ("+xadd", "%W~{c}ctl:activations %W~{c}ctl:load"),
    ],
    "edge-agent": [
        *OWN,
        *AGREES,
        *LOOKS_AT_BROWNOUT,
        ("+xadd", "%W~{c}ctl:activations %W~{c}ctl:profiles %W~{c}ctl:latency"),
    ],
}
ALL_CLUSTERS = "moesaic:{*}:"  # every key begins with the cluster's name in braces


def main() -> None:
    """Write what is missing."""
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "secrets")
    make(directory)
    print(f"secrets are in {directory}")


def make(directory: Path) -> None:
    """Write the files of a directory that are missing."""
    directory.mkdir(parents=True, exist_ok=True)
    # Also if it exists: its files are readable by all users with access to it.
    directory.chmod(0o700)
    create(directory / "cluster_secret", secrets.token_hex(32))
    create(directory / "block_secret", secrets.token_hex(32))
    create(directory / "api_key", f"moesaic_sk_{secrets.token_urlsafe(32)}")
    create(directory / "grafana_password", secrets.token_urlsafe(32))
    urls = {role: create(directory / f"redis_url_{role}", redis_url(role)) for role in ROLES}
    create(directory / "redis_users", redis_users(urls))


def create(path: Path, text: str) -> str:
    """Write a file unless it exists; returns what it holds.

    Compose mounts the files as they are, so the services' user must be able to read them; others on this machine
    are kept out by the directory's mode.
    """
    if path.exists():
        found = path.read_text(encoding="utf-8").strip()
        if not found:
            sys.exit(f"{path} is empty: remove it and run this again")
        return found
    # Renamed when it is complete: half a secret must not stay.
    whole = path.with_suffix(".new")
    whole.write_text(f"{text}\n", encoding="utf-8")
    whole.chmod(0o444)
    whole.rename(path)
    return text


def redis_url(role: str) -> str:
    """Return the URL of Redis for a role's services, with its password."""
    return f"redis://{role}:{quote(secrets.token_urlsafe(24))}@{REDIS}"


def redis_users(urls: dict[str, str]) -> str:
    """Return Redis's ACL file: one user for each role with only the rights it needs; passwords as hashes."""
    users = [
        "user default off resetpass resetkeys resetchannels -@all",
        "user health on nopass resetkeys resetchannels -@all +ping",  # for Redis's own health check
    ]
    for role, url in urls.items():
        digest = hashlib.sha256((urlsplit(url).password or "").encode()).hexdigest()
        rights = " ".join(f"({commands} {keys})" for commands, keys in RIGHTS[role])
        rights = rights.format(c=ALL_CLUSTERS, role=role)
        users.append(f"user {role} on #{digest} resetkeys resetchannels -@all {EVERYONE} {rights}")
    return "\n".join(users)


if __name__ == "__main__":
    main()
