"""Read and update shards, as flows: generators that yield requests and do no I/O."""
