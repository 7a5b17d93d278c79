"""The files of jobs in a Mooncake store: what its objects are called, and the process that is its client."""
