"""Files: reading and writing models, external data, and the protobuf and JSON in them."""
