"""``kvflow proxy``: a small router that sends each request to one prefill server and one decode server in turn."""
