"""The merged index of a checkpoint of several ranks: where every block of every tensor lies, in arrays.

``making`` derives it from the tables in the manifests, ``index`` reads it back, ``reading`` finds it on a tier. Nothing
is only in it: without it, or where it is damaged, the manifests say the same.
"""
