//! Bugs in the loops of kernels over their grids: the tests must find each with a limited grid.

use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pushpull_common::codec::Codec;
use pushpull_cuda_emulator::turn::Turn;

use crate::codecs::{compare_rounds, first_non_finite};
use crate::emulator::{Devices, GRIDS};
use crate::kernels;

/// A test of a kernel.
type KernelTest = fn(&Devices);

/// The kernels with loops over their grids: the text of its module, the name and the test of each.
const KERNELS: [(&str, &str, KernelTest); 29] = [
    (ACTIVATION, "activate", kernels::activations),
    (ACTIVATION, "activate_back", kernels::activations),
    (ACTIVATION, "sum_rows", kernels::activations),
    (CAST, "round_f16", few_casts),
    (CAST, "widen_f16", few_casts),
    (CAST, "round_bf16", few_casts),
    (CAST, "widen_bf16", few_casts),
    (CODEC, "first_non_finite", first_non_finite),
    (CODEC, "encode_f16", |devices| compare_rounds(devices, Codec::F16)),
    (CODEC, "encode_bf16", |devices| compare_rounds(devices, Codec::Bf16)),
    (CODEC, "encode_int8", |devices| compare_rounds(devices, Codec::Int8)),
    (CODEC, "encode_one_bit", |devices| compare_rounds(devices, Codec::OneBit)),
    (CODEC, "top_k_histogram", top_k),
    (CODEC, "top_k_count", top_k),
    (CODEC, "top_k_write", top_k),
    (ELEMENTWISE, "axpy", kernels::elements),
    (ELEMENTWISE, "add", kernels::elements),
    (ELEMENTWISE, "mul", kernels::elements),
    (ELEMENTWISE, "div", kernels::elements),
    (ELEMENTWISE, "scale", kernels::elements),
    (ELEMENTWISE, "fill", kernels::elements),
    (ELEMENTWISE, "sum_chunks", kernels::elements),
    (EMBEDDING_BAG, "embedding_bag", kernels::embedding_bags),
    (EMBEDDING_BAG, "embedding_bag_rows", kernels::embedding_bags),
    (EMBEDDING_BAG, "embedding_bag_add", kernels::embedding_bags),
    (GEMM, "multiply", kernels::products),
    (LOSS, "softmax_cross_entropy", kernels::losses),
    (LOSS, "sigmoid_cross_entropy", kernels::losses),
    (LOSS, "mean_squared_error", kernels::losses),
];

const ACTIVATION: &str = include_str!("../../src/cuda/kernels/ptx/activation.ptx");
const CAST: &str = include_str!("../../src/cuda/kernels/ptx/cast.ptx");
const CODEC: &str = include_str!("../../src/cuda/kernels/ptx/codec.ptx");
const ELEMENTWISE: &str = include_str!("../../src/cuda/kernels/ptx/elementwise.ptx");
const EMBEDDING_BAG: &str = include_str!("../../src/cuda/kernels/ptx/embedding_bag.ptx");
const GEMM: &str = include_str!("../../src/cuda/kernels/ptx/gemm.ptx");
const LOSS: &str = include_str!("../../src/cuda/kernels/ptx/loss.ptx");

fn few_casts(devices: &Devices) {
    kernels::casts(devices, 51);
}

fn top_k(devices: &Devices) {
    compare_rounds(devices, Codec::TopK { fraction: 0.3 });
}

/// Bugs that change no result: the lowest index is the same if an element is seen twice, and
/// between the last barriers of these rounds no thread reads what another writes next.
const HARMLESS: [(&str, &str); 4] = [
    ("first_non_finite", "the stride is one block"),
    ("first_non_finite", "the stride is an element too short"),
    ("encode_one_bit", "no barrier ends a round"),
    ("sum_chunks", "no barrier ends a round"),
];

/// More instructions than a launch of these tests executes.
const STEPS_MAX: u64 = 8_000_000;

/// A kernel with a bug.
struct PlantedBug {
    kernel: &'static str,
    what: String,
    original: &'static str,
    planted: String,
    test: KernelTest,
}

/// Returns the text of a kernel.
fn kernel_text(module: &'static str, name: &str) -> &'static str {
    let start = module.find(&format!(".entry {name}(")).expect("the kernel is in its module");
    let length = module[start..].find("\n}").expect("a kernel ends");
    &module[start..start + length]
}

/// The loops of a kernel over its grid, by the instructions that `make_ptx.py` compiles them to.
struct GridLoop {
    /// `mov.u32 %r, %nctaid.x;`, and its register.
    blocks: &'static str,
    blocks_register: &'static str,
    /// The line that computes the number of threads from it, and its register.
    threads: Option<(&'static str, &'static str)>,
    /// The line that advances the index, and the index.
    advance: &'static str,
    index: &'static str,
    /// The body, from its label up to the line that advances.
    body: &'static str,
    /// The last barrier before the line that advances, if it is at the end of the round.
    has_barrier: bool,
}

/// Returns the first operand of an instruction.
fn target(line: &str) -> &str {
    let operands = line.trim().split_once(char::is_whitespace).expect("an instruction").1;
    operands.trim().split(',').next().expect("an operand").trim_end_matches(';')
}

fn grid_loops(text: &'static str) -> Vec<GridLoop> {
    let counts = text.lines().filter(|line| line.contains("%nctaid"));
    counts.map(|line| grid_loop(text, line)).collect()
}

fn grid_loop(text: &'static str, blocks: &'static str) -> GridLoop {
    let blocks_register = target(blocks);
    let mut uses = text.lines().skip_while(|line| *line != blocks);
    let wide = uses.find(|line| line.contains(&format!(", {blocks_register};"))).expect("a use");
    assert!(wide.contains("cvt.u64.u32"), "{wide}");
    let product =
        |line: &&str| line.contains("mul.lo.s64") && line.contains(&format!(" {},", target(wide)));
    let threads = uses.find(product).map(|line| (line, target(line)));
    let stride = threads.map_or(target(wide), |(_, register)| register);
    let is_advance = |line: &&str| {
        let register = line.trim().starts_with("add.s64").then(|| target(line));
        register.is_some_and(|index| line.contains(&format!("{index}, {index}, {stride};")))
    };
    let advance = text.lines().rfind(is_advance).expect("the index is advanced");
    let (before, behind) = text.split_once(advance).expect("it is a line");
    let back = behind.lines().find(|line| line.contains("bra")).expect("a loop goes back");
    let label = back.rsplit(char::is_whitespace).next().expect("a label").trim_end_matches(';');
    let start = before.rfind(&format!("{label}:")).expect("a loop begins") + label.len() + 1;
    GridLoop {
        blocks,
        blocks_register,
        threads,
        advance,
        index: target(advance),
        body: &before[start..],
        has_barrier: before.trim_end().ends_with("bar.sync \t0;"),
    }
}

/// Returns a text with a register replaced by another.
fn rename(text: &str, from: &str, to: &str) -> String {
    let mut renamed = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(from) {
        let (before, found) = rest.split_at(at);
        let behind = &found[from.len()..];
        let is_longer = behind.starts_with(|next: char| next.is_ascii_digit());
        renamed.push_str(before);
        renamed.push_str(if is_longer { from } else { to });
        rest = behind;
    }
    renamed + rest
}

/// Every bug of one loop: a description, and the text of the kernel with it.
fn bugs(text: &'static str, grid: &GridLoop) -> Vec<(&'static str, String)> {
    let GridLoop { blocks, blocks_register: register, body, index, .. } = grid;
    let replaced = |from: &str, to: &str| text.replacen(from, to, 1);
    let set = |value: &str| replaced(blocks, &format!("\tmov.u32 \t{register}, {value};"));
    let changed =
        |by: i32| replaced(blocks, &format!("{blocks}\n\tadd.s32 \t{register}, {register}, {by};"));
    let first = replaced(body, &rename(body, index, "%first"));
    let label = text[..text.find(body).expect("the body is in the text")]
        .rfind('$')
        .expect("the body follows its label");
    let (head, tail) = first.split_at(label);
    let first = format!("{head}mov.u64 \t%first, {index};\n\n{tail}").replacen(
        "\n{\n",
        "\n{\n\t.reg .b64 \t%first;\n",
        1,
    );
    let mut bugs = vec![
        ("the stride is 0", set("0")),
        ("the stride is one block", set("1")),
        ("the stride is a block too long", changed(1)),
        ("the stride is a block too short", changed(-1)),
        ("there is no second round", set("0x7fffffff")),
        ("each round uses the first index", first),
    ];
    if let Some((line, threads)) = grid.threads {
        let threads_changed =
            |by: i32| replaced(line, &format!("{line}\n\tadd.s64 \t{threads}, {threads}, {by};"));
        bugs.push(("the stride is an element too long", threads_changed(1)));
        bugs.push(("the stride is an element too short", threads_changed(-1)));
    }
    if grid.has_barrier {
        let at_end = format!("\tbar.sync \t0;\n{}", grid.advance);
        bugs.push(("no barrier ends a round", replaced(&at_end, grid.advance)));
    }
    bugs
}

fn planted_bugs() -> Vec<PlantedBug> {
    let mut all = Vec::new();
    for (module, kernel, test) in KERNELS {
        let text = kernel_text(module, kernel);
        for (number, grid) in grid_loops(text).iter().enumerate() {
            let harmful = bugs(text, grid)
                .into_iter()
                .filter(|(what, _)| !HARMLESS.contains(&(kernel, what)));
            for (what, planted) in harmful {
                assert_ne!(planted, text, "{kernel}: {what}");
                let what = format!("loop {number}: {what}");
                all.push(PlantedBug { kernel, what, original: text, planted, test });
            }
        }
    }
    all
}

/// Returns whether a test finds a bug.
fn finds(emulator: &Turn, bug: Option<&PlantedBug>, test: KernelTest, grid: Option<u32>) -> bool {
    emulator.reset();
    emulator.set_steps_max(STEPS_MAX);
    if let Some(bug) = bug {
        let [original, planted] =
            [bug.original, &bug.planted].map(|text| CString::new(text).unwrap());
        emulator.plant(&original, &planted);
    }
    let devices = Devices::open(grid);
    let passes = catch_unwind(AssertUnwindSafe(|| test(&devices))).is_ok();
    drop(devices);
    let found = !passes || !emulator.faults().is_empty();
    // The memory of a device that has failed is not given back.
    emulator.reset();
    found
}

#[test]
fn each_kernel_with_a_loop_over_its_grid_has_a_test() {
    for module in [ACTIVATION, CAST, CODEC, ELEMENTWISE, EMBEDDING_BAG, GEMM, LOSS] {
        for entry in module.split(".entry ").skip(1).filter(|entry| entry.contains("%nctaid")) {
            let name = entry.split('(').next().unwrap();
            assert!(KERNELS.iter().any(|(_, kernel, _)| *kernel == name), "{name}");
        }
    }
}

/// With each limited grid by itself, the test of a kernel passes without a bug, and one of them
/// finds each bug.
#[test]
fn every_bug_in_a_stride_is_found_with_a_limited_grid() {
    let Some(emulator) = Turn::start().map(Turn::expects_faults) else { return };
    for (_, kernel, test) in KERNELS {
        for grid in GRIDS {
            assert!(!finds(&emulator, None, test, grid), "{kernel} with {grid:?} blocks");
        }
    }
    let bugs = planted_bugs();
    let is_thorough = std::env::var_os("PUSHPULL_THOROUGH").is_some();
    let mut found_by = [0; GRIDS.len()];
    let mut missed = Vec::new();
    for bug in &bugs {
        // The largest limited grid finds most.
        let mut is_found = false;
        for (at, &grid) in GRIDS.iter().enumerate().rev() {
            let is_needed = is_thorough || (grid.is_some() && !is_found);
            if is_needed && finds(&emulator, Some(bug), bug.test, grid) {
                found_by[at] += 1;
                is_found |= grid.is_some();
            }
        }
        if !is_found {
            missed.push(format!("{}, {}", bug.kernel, bug.what));
        }
    }
    println!("{} planted bugs: {found_by:?} are found by grids of {GRIDS:?} blocks", bugs.len());
    assert!(missed.is_empty(), "{missed:#?}");
}
