"""What services tell each other over Redis: versioned msgspec structs, encoded as msgpack."""
