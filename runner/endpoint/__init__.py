"""The HTTP endpoint of an episode for agent programs: three wire forms of requests, and one request handler."""
