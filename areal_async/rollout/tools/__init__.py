"""Tools: plain functions, and those of MCP servers, that a model may call.

``parse``   what the model wrote -> calls
``schema``  a function -> what the model is told of it, and its arguments, checked
``run``     a call -> what the model is told came of it
``mcp``     a server's tools, ``mcp_connection`` the connection to it
"""
