# Clients of which each needs packages that no other one can live with: a virtual environment each.

CLIENTS := openai_agents llama_index smolagents litellm dspy
openai_agents_NEEDS := openai-agents==0.24.0
llama_index_NEEDS := llama-index-llms-openai-like==0.8.1
smolagents_NEEDS := smolagents[openai]==1.26.0
litellm_NEEDS := litellm==1.110.2
dspy_NEEDS := dspy==3.4.1
lm_eval_NEEDS := lm-eval[api]==0.4.13

# The stamp comes last; an interrupted install starts anew.
.venv-clients/%/installed: clients.mk
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check '$($*_NEEDS)'
	@touch $@

clients: install $(CLIENTS:%=.venv-clients/%/installed)
	PYTHONPATH='$(CURDIR)' $(BIN)/python -P -m tests.clients.run_all .venv-clients $(CLIENTS)

lm-eval: install .venv-clients/lm_eval/installed
	PYTHONPATH='$(CURDIR)' $(BIN)/python -P -m tests.clients.lm_eval.compare .venv-clients/lm_eval

# Two hundred connections, half of which misbehave, for a minute.
abuse: install
	$(BIN)/python tests/doubles/abuse.py --seconds 60 --connections 200

# Whether the time of an answer tells what another key has cached; with a control that does.
salt-timing: install
	OMP_NUM_THREADS=1 $(BIN)/python -P benchmarks/salt_timing.py

.PHONY: clients lm-eval abuse salt-timing
