"""An edge: the Open Inference Protocol v2 over HTTP and gRPC, metrics, and the state pages.

It takes no decisions about requests: it validates them, passes them to the deciding process, and sends the answers.
"""
