"""The one integer that says whether a plugin and this core understand each other.

What changed in each value:
* 1: first public form.
"""

PLUGIN_API = 1
