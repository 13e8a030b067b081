"""Describes the HTTP API: an OpenAPI document made from the code, and a page that shows the
document.
"""
