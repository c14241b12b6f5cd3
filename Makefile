.PHONY: catalogue
PY := .venv/bin/python

catalogue:  ## write what follows from plugins.toml
	$(PY) .ci/catalogue.py sync
