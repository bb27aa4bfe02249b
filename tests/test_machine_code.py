"""What must hold in the kernels' machine code, read from the built extension on any machine with cuobjdump."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import flashmsa

LIBRARY = Path(flashmsa._C.__file__)
KERNELS = flashmsa._C.kernels()
BACKWARD = flashmsa._C.backward_kernels()
DECODE, PREFILL = ([x for x in flashmsa._C.paged_kernels() if x["path"] == path] for path in ("decode", "prefill"))
REGISTERS_OF_AN_SM = 65536

# Parts of the names of kernels that may use mma.sync beside wgmma. None needs to.
MAY_HOLD_HMMA: tuple[str, ...] = ()


def find_tools() -> Path | None:
    """The folder with cuobjdump and nvdisasm: from pip's packages, or a CUDA toolkit."""
    site = Path(sysconfig.get_paths()["purelib"])
    folders = [*sorted(site.glob("nvidia/*/bin")), *(Path(p) for p in os.environ.get("PATH", "").split(os.pathsep))]
    for folder in [*folders, Path("/usr/local/cuda/bin")]:
        if all(shutil.which(name, path=str(folder)) for name in ("cuobjdump", "nvdisasm")):
            return folder
    return None


TOOLS = find_tools()
pytestmark = [
    pytest.mark.skipif(not KERNELS, reason=f"this build has no kernels: {flashmsa._C.build_info()['reason']}"),
    pytest.mark.skipif(TOOLS is None, reason="needs cuobjdump and nvdisasm (pip install 'flashmsa[test]')"),
]


@dataclass
class Function:
    """One function of the extension's device code."""

    name: str
    opcodes: dict[str, int] = field(default_factory=dict)  # instruction without its modifiers, to its count
    usage: dict[str, int] = field(default_factory=dict)  # REG, STACK, SHARED, LOCAL, ...
    code: list[tuple[int, str]] = field(default_factory=list)  # address, instruction

    def count(self, opcode: str) -> int:
        return self.opcodes.get(opcode, 0)

    def loops(self) -> list[list[str]]:
        """The instructions between each backward branch and its target, shortest first."""
        found = []
        for address, text in self.code:
            target = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", text)
            if target and int(target[1], 16) < address:
                found.append([x for at, x in self.code if int(target[1], 16) <= at <= address])
        return sorted(found, key=len)


def cuobjdump(option: str) -> str:
    # cuobjdump starts nvdisasm, and looks for it on PATH.
    environment = {**os.environ, "PATH": f"{TOOLS}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [TOOLS / "cuobjdump", option, LIBRARY]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def functions() -> dict[str, Function]:
    """Every function of the extension, with its instructions counted and its resources. Names may come several times,
    from several files, with the same code: the last one stands."""
    found: dict[str, Function] = {}
    current = Function("")
    for line in cuobjdump("-sass").splitlines():
        if match := re.match(r"\s*Function : (\S+)", line):
            current = found[match[1]] = Function(match[1])
        elif match := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)[^;]*)", line):
            current.opcodes[match[3]] = current.opcodes.get(match[3], 0) + 1
            current.code.append((int(match[1], 16), match[2]))
    name = None
    for line in cuobjdump("-res-usage").splitlines():
        if match := re.match(r"\s*Function (\S+):", line):
            name = match[1]
        elif name is not None and "REG:" in line:
            found[name].usage = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}
            name = None
    return found


@dataclass
class Family:
    """The functions of one kind of attention kernel, and the rows of its table."""

    functions: list[Function]
    table: list[dict]


# By the name of the kernel's function.
FAMILIES = {
    "attention_forward_kernel": KERNELS,
    "attention_backward_kernel": BACKWARD,
    "paged_attention_kernel": PREFILL,
    "paged_decode_kernel": DECODE,
    "cluster_decode_kernel": DECODE,
}
BY_WGMMA = tuple(name for name in FAMILIES if "decode" not in name)


def functions_of(name: str, row: dict) -> int:
    """Up to head dim 128 decode has two kernels of each kind, of more or fewer warps or CTAs an SM, and one by wgmma,
    and each once more for plain calls. The backward pass has two, but for packed documents and bands in clusters: one
    adds to dQ in any order, one in turns."""
    if "decode" in name:
        by_warpgroups = name == "paged_decode_kernel"
        return 4 + 2 * by_warpgroups if row["head_dim_bucket"] <= 128 else 2
    if name != "attention_backward_kernel":
        return 1
    return 1 if row["packed"] or (row["band"] and row["block_kv"] > 128) else 2


@pytest.fixture(scope="module")
def families(functions: dict[str, Function]) -> dict[str, Family]:
    return {
        name: Family([function for known, function in functions.items() if name in known], table)
        for name, table in FAMILIES.items()
    }


@pytest.fixture(scope="module")
def forward(families: dict[str, Family]) -> list[Function]:
    return families["attention_forward_kernel"].functions


@pytest.mark.parametrize("name", FAMILIES)
def test_every_kernel_of_the_table_is_there(families: dict[str, Family], name: str) -> None:
    family = families[name]
    assert len(family.functions) == sum(functions_of(name, row) for row in family.table) > 0
    assert all(function.opcodes and function.usage for function in family.functions)


def test_only_sm_90a() -> None:
    assert set(re.findall(r"arch = (\S+)", cuobjdump("-lelf") + cuobjdump("-res-usage"))) == {"sm_90a"}


# wgmma for the products, TMA for what goes in and out: UTMASTG stores a tile, UTMAREDG, UBLKRED and REDG add to memory.
# Decode's few rows are mma.sync's (HMMA), more of them wgmma's; its small pages, and the forward pass's rows by index,
# cp.async's (LDGSTS).
# CTAs of a cluster send their parts to each other by stores that count on a barrier there (STAS).
@pytest.mark.parametrize(
    "name, opcodes",
    [
        ("attention_forward_kernel", ("HGMMA", "UTMALDG|LDGSTS", "UTMASTG|LDGSTS")),
        ("attention_backward_kernel", ("HGMMA", "UTMALDG", "UTMASTG", "UBLKRED|UTMAREDG|REDG")),
        ("paged_attention_kernel", ("HGMMA", "UTMALDG", "UTMASTG")),
        ("paged_decode_kernel", ("HMMA|HGMMA", "UTMALDG", "LDGSTS")),
        ("cluster_decode_kernel", ("HMMA", "UTMALDG", "LDGSTS", "UCGABAR_WAIT", "STAS")),
    ],
)
def test_tensor_cores_and_bulk_copies(families: dict[str, Family], name: str, opcodes: tuple[str, ...]) -> None:
    for function in families[name].functions:
        for opcode in opcodes:
            assert any(function.count(x) > 0 for x in opcode.split("|")), f"{function.name} has no {opcode}"


def test_decode_by_warpgroups(families: dict[str, Family]) -> None:
    """Both products by wgmma: Q and P from registers, so that no fragment is loaded."""
    found = [x for x in families["paged_decode_kernel"].functions if "ByWarpgroups" in x.name]
    assert len(found) == 2 * sum(row["head_dim_bucket"] <= 128 for row in DECODE)
    for function in found:
        assert function.count("HMMA") == function.count("LDSM") == 0 < function.count("HGMMA"), function.name
    others = [x for x in families["paged_decode_kernel"].functions if x not in found]
    assert not any(function.count("HGMMA") for function in others)


def test_backward_clusters(families: dict[str, Family]) -> None:
    """At head dim 256, and in bands of 128, a CTA loads half of each query tile, to both of its cluster, and sends dS
    to the other (UBLKCP.S.S). Nobody else is in a cluster. dQ is added from registers at 256, by bulk copies else."""
    for function in families["attention_backward_kernel"].functions:
        clustered = "Li256E" in function.name or "4BandELi128E" in function.name
        code = [text for _, text in function.code]
        assert any("UTMALDG" in text and "MULTICAST" in text for text in code) == clustered, function.name
        assert any("UBLKCP.S.S" in text for text in code) == clustered, function.name
        assert any("UCGABAR_WAIT" in text for text in code) == clustered, function.name
        from_registers = "Li256E" in function.name
        assert any("REDG" in text and "F32" in text for text in code) == from_registers, function.name
        assert (function.count("UBLKRED") > 0) == (not from_registers), function.name


@pytest.mark.parametrize("name", ["paged_decode_kernel", "cluster_decode_kernel"])
def test_chunks_are_given_back_behind_a_fence(families: dict[str, Family], name: str) -> None:
    """Without one the arrival does not wait for a chunk's last LDSM, and the next chunk may come first."""
    for function in families[name].functions:
        fenced, arrivals = True, 0
        for address, text in function.code:
            if text.startswith("LDSM"):
                fenced = False
            elif text.startswith("FENCE.VIEW.ASYNC"):
                fenced = True
            elif "SYNCS.ARRIVE" in text:
                assert fenced, f"{function.name} arrives at {address:#x} before its loads are done"
                arrivals += 1
        assert arrivals > 0, function.name


@pytest.mark.parametrize("name", ["attention_forward_kernel", "paged_attention_kernel"])
def test_q_is_given_back_when_it_is_here(families: dict[str, Family], name: str) -> None:
    """Between an LDSM and the arrival for Q's buffer stands a look at what it brings; see sm90::wait_ldmatrix. Of the
    barriers where somebody arrives without announcing bytes that one comes first in shared memory."""
    arrival = re.compile(r"SYNCS\.ARRIVE\S*A1T0 RZ, \[.*(0x[0-9a-f]+)\]")
    found = 0
    for function in families[name].functions:
        if function.count("LDSM") == 0:
            continue
        arrivals = {at: int(match[1], 16) for at, text in function.code if (match := arrival.search(text))}
        in_flight: list[set[int]] = []
        for address, text in function.code:
            if loaded := re.match(r"LDSM\S* R(\d+),", text):
                in_flight.append({int(loaded[1]) + n for n in range(4)})
                continue
            looked_at = {int(n) for n in re.findall(r"\bR(\d+)\b", text)}
            in_flight = [registers for registers in in_flight if not registers & looked_at]
            if arrivals.get(address) == min(arrivals.values()):
                assert not in_flight, f"{function.name} arrives at {address:#x} before {in_flight} are here"
                found += 1
    assert found > 0


def test_rows_by_index_and_by_tma(forward: list[Function]) -> None:
    """Hash buckets' rows come one by one and go one by one; everyone else's by TMA alone."""
    for kernel in KERNELS:
        function = function_of(kernel, forward)
        by_index, by_tma = function.count("LDGSTS") > 0, function.count("UTMALDG") > 0 and function.count("UTMASTG") > 0
        assert (by_index, by_tma) == ((True, False) if kernel["mask"] == "hash" else (False, True)), kernel["name"]


def test_no_local_memory(functions: dict[str, Function]) -> None:
    for function in functions.values():
        spilled = {opcode: function.count(opcode) for opcode in ("LDL", "STL") if function.count(opcode)}
        assert spilled == {}, f"{function.name}: {spilled}"
        assert function.usage["STACK"] == 0 and function.usage["LOCAL"] == 0, f"{function.name}: {function.usage}"


@pytest.mark.parametrize("name", BY_WGMMA)
def test_no_older_tensor_instructions(families: dict[str, Family], name: str) -> None:
    for function in families[name].functions:
        if not any(name in function.name for name in MAY_HOLD_HMMA):
            assert function.count("HMMA") == 0, f"{function.name}: {function.count('HMMA')} HMMA"


# What the general kernels decide at run time takes uniform registers too; they are not made for speed.
@pytest.mark.parametrize("kernel", [x for x in KERNELS if not x["general"]], ids=lambda kernel: kernel["name"])
def test_descriptors_stay_in_uniform_registers(forward: list[Function], kernel: dict) -> None:
    """In the loop over full key blocks: a descriptor from ordinary registers costs two R2UR before every wgmma, at d128
    an eighth of the speed. The compiler does that when it cannot see that ring positions are the same in all lanes.

    Fewer than one to a wgmma are the loop's own: at d256 dense, 11 beside 20 ran no slower than 9.
    """
    a_block = kernel["head_dim_bucket"] // 16 + kernel["block_kv"] // 16  # wgmmas of one key block
    a_block += takes_places(kernel)
    loop = next(loop for loop in function_of(kernel, forward).loops() if sum("HGMMA" in x for x in loop) == a_block)
    moves = sum("R2UR" in x for x in loop)
    limit = a_block // 2 if kernel["head_dim_bucket"] < 256 else a_block - 1
    assert moves <= limit, f"{moves} R2UR beside {a_block} HGMMA"


def takes_places(kernel: dict) -> bool:
    """ALiBi by one more k-step of Q K^T: up to head dim 128, without a soft cap, but not for lists."""
    alone = kernel["alibi"] and not kernel["softcap"] and not kernel["general"]
    return alone and kernel["mask"] in ("causal", "composite") and kernel["head_dim_bucket"] <= 128


@pytest.mark.parametrize("name", BY_WGMMA)
def test_warps_wait_for_wgmma_at_one_place(families: dict[str, Family], name: str) -> None:
    """PTX asks all warps of a warpgroup for one and the same wgmma.wait_group. So none stands where a warp may come by
    a test of its own, in either branch of it: a wait, a jump over another one, that one. Not with a soft cap (Score's
    first argument): sm90::wgmma_wait_in_branch.
    """
    for function in families[name].functions:
        if "ScoreILb1ELb0E" in function.name:
            continue
        code = [(address, text.split()) for address, text in function.code if text.strip() != "NOP"]
        for first, jump, second in zip(code, code[1:], code[2:], strict=False):
            if first[1][0] != "WARPGROUP.DEPBAR.LE" or jump[1][0] != "BRA":
                continue
            assert second[1][0] != "WARPGROUP.DEPBAR.LE", f"{function.name}: two waits at {first[0]:#x}"


def goes_by_sums(kernel: dict) -> bool:
    """Whether the sums of P say that a row outgrows its reference, and no maximum of S: Consumer::kTriesExponents."""
    by_options = kernel["softcap"] or kernel["dropout"] or (kernel["alibi"] and not takes_places(kernel))
    if by_options or kernel["general"]:
        return False
    widths = kernel["head_dim_bucket"], kernel["head_dim_v_bucket"]
    if widths == (64, 64):
        return kernel["alibi"]
    # At 128 not the kernels of three warpgroups, which are for documents and rows by index.
    return widths == (96, 96) or (widths == (128, 128) and kernel["registers_consumer"] > 200)


def loop_of_full_blocks(kernel: dict, functions: list[Function]) -> list[str]:
    a_block = kernel["head_dim_bucket"] // 16 + kernel["block_kv"] // 16 + takes_places(kernel)
    return next(loop for loop in function_of(kernel, functions).loops() if sum("HGMMA" in x for x in loop) == a_block)


def vote_on_sums(loop: list[str]) -> int:
    """Where a loop over full key blocks asks whether its sums serve: the first vote behind the wait for P V."""
    waits = [at for at, text in enumerate(loop) if text.startswith("WARPGROUP.DEPBAR")]
    assert len(waits) == 2
    return next(at for at, text in enumerate(loop) if at > waits[1] and text.startswith("VOTE.ANY"))


@pytest.mark.parametrize(
    "kernel", [x for x in KERNELS if x["alibi"] and not x["general"]], ids=lambda kernel: kernel["name"]
)
def test_alibi_adds_nothing_to_the_elements_of_a_full_block(forward: list[Function], kernel: dict) -> None:
    """Where a k-step brings the penalties, only the exponents are left; elsewhere there is one more multiply-add."""
    loop = loop_of_full_blocks(kernel, forward)
    if goes_by_sums(kernel):  # behind the vote the exponents come again
        loop = loop[: vote_on_sums(loop)]
    elements = kernel["block_kv"] // 2  # of a thread
    found = sum("FFMA" in x for x in loop)
    assert (found < 1.5 * elements) if takes_places(kernel) else (found >= 2 * elements), f"{found} FFMA"


@pytest.mark.parametrize("kernel", [x for x in KERNELS if goes_by_sums(x)], ids=lambda kernel: kernel["name"])
def test_the_sums_of_weights_stand_for_the_maximum(forward: list[Function], kernel: dict) -> None:
    """In the loop over full key blocks all exponentials come ahead of the vote that says whether the sums serve, and no
    maximum does. Where they do not serve a maximum and the exponentials come again."""
    loop = loop_of_full_blocks(kernel, forward)
    vote = vote_on_sums(loop)
    exponentials = sum("MUFU.EX2" in text for text in loop[:vote])
    assert exponentials == kernel["block_kv"] // 2, f"{exponentials} ahead of {vote} of {len(loop)}"
    assert not any("MNMX" in text for text in loop[:vote])


@pytest.mark.parametrize(
    "kernel",
    [x for x in KERNELS if (x["alibi"] or not x["softcap"]) and not goes_by_sums(x)],
    ids=lambda kernel: kernel["name"],
)
def test_the_wait_for_values_stays_behind_the_maximum(forward: list[Function], kernel: dict) -> None:
    """In the loop over full key blocks P V is waited for once, and behind the maximum of S that says whether a row
    outgrows its reference: P V overlaps it."""
    loop = loop_of_full_blocks(kernel, forward)
    waits = [at for at, text in enumerate(loop) if text.startswith("WARPGROUP.DEPBAR")]
    maximum = max(at for at, text in enumerate(loop) if text.startswith("VIMNMX"))
    assert len(waits) == 2 and waits[1] > maximum, f"waits at {waits}, the maximum's end at {maximum} of {len(loop)}"


@pytest.mark.parametrize("name", BY_WGMMA)
def test_registers_move_between_warpgroups(families: dict[str, Family], name: str) -> None:
    """Warpgroup 0 gives registers away and the others take them.

    NOTE: the pool that setmaxnreg deals out is entry registers x threads; asking for more hangs for ever.
    """
    warpgroups = {kernel["threads"] // 128 for kernel in families[name].table}
    for function in families[name].functions:
        texts = [text for _, text in function.code if "USETMAXREG" in text]
        given, taken = (
            [int(text.split()[-1], 16) for text in texts if word in text] for word in ("DEALLOC", "TRY_ALLOC")
        )
        assert given and taken, f"{function.name}: {texts}"
        fitting = [n for n in warpgroups if max(given) + (n - 1) * max(taken) <= n * function.usage["REG"]]
        assert fitting, f"{function.name}: {texts} of {function.usage['REG']} registers"
        assert any(n * 128 * function.usage["REG"] <= REGISTERS_OF_AN_SM for n in fitting), function.name


def function_of(kernel: dict, forward: list[Function]) -> Function:
    """The function of a row of the table: its mask, its Config<dtype, head dim, of v, rows, ...>, its
    Score<softcap, alibi> or with dropout its Dropping or General."""
    dtype = {"bfloat16": "13__nv_bfloat16", "float16": "6__half"}[kernel["dtype"]]
    mask = "".join(part.capitalize() for part in kernel["mask"].split("_"))
    if mask == "Document":  # as the forward kernels know it
        mask = "ShortPacked" if "short" in kernel["name"] else "Packed"
    score = f"ScoreILb{kernel['softcap']:d}ELb{kernel['alibi']:d}E"
    if kernel["dropout"]:
        score = "7GeneralE" if kernel["general"] else "8DroppingE"
    widths = "".join(f"Li{kernel[name]}E" for name in ("head_dim_bucket", "head_dim_v_bucket", "block_q"))
    pattern = re.compile(rf"{len(mask)}{mask}E.*I{dtype}{widths}.*{score}")
    (function,) = (function for function in forward if pattern.search(function.name))
    return function


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel["name"])
def test_registers_fit(forward: list[Function], kernel: dict) -> None:
    """NOTE: the pool that setmaxnreg deals out is entry registers x threads; asking for more hangs for ever."""
    consumers = kernel["consumer_warpgroups"]
    producers = kernel["threads"] // 128 - consumers
    wanted = 128 * (producers * kernel["registers_producer"] + consumers * kernel["registers_consumer"])
    pool = function_of(kernel, forward).usage["REG"] * kernel["threads"]
    assert wanted <= pool <= REGISTERS_OF_AN_SM // kernel["ctas_per_sm"]
