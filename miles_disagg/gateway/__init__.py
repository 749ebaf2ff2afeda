"""The single rollout endpoint in front of any number of replicas."""
