"""What ``omni doctor`` finds: in the keys of a namespace, and in the files of this machine."""
