//! A steady training step makes no allocation of 4 KiB or more, on the worker or on a shard, in any
//! encoding of gradients and values.
//!
//! The allocator counts by thread, so the figures of the caller, the session's thread and the
//! shards' threads are separate.

#![allow(clippy::unwrap_used, reason = "a failed test reports the line")]

mod cluster;
mod counting;
mod dense;
mod rows;

use pushpull::variable::DType;
use pushpull::worker::Codec;

use cluster::{AllocationCase, Form, PLAIN};
use counting::{RARE, exclusive};

#[test]
fn a_dense_step_makes_no_bulk_allocation() {
    let _exclusive = exclusive();
    println!("up to {} steps of each kind are counted in a round", counted_steps(1_000));
    let mut report = AllocationReport::default();
    // One part for each shard, and several.
    for (elements, steps) in [(1_001, counted_steps(1_000)), (150_001, counted_steps(200))] {
        for case in cases(elements, steps) {
            report.add(&case, &dense::per_step(&case));
        }
    }
    report.end();
}

#[test]
fn a_step_with_rows_makes_no_bulk_allocation() {
    let _exclusive = exclusive();
    let mut report = AllocationReport::default();
    for case in cases(8, counted_steps(300)) {
        report.add(&case, &rows::per_step(&case));
    }
    report.end();
}

/// Every encoding of gradients and values but the plain one.
const FORMS: &[Form] = &[
    Form { name: "gradients as f16", codec: Some(Codec::F16), ..PLAIN },
    Form { name: "gradients as bf16", codec: Some(Codec::Bf16), ..PLAIN },
    Form { name: "gradients as int8", codec: Some(Codec::Int8), ..PLAIN },
    Form { name: "gradients of f64 as int8", codec: Some(Codec::Int8), dtype: DType::F64, ..PLAIN },
    Form { name: "gradients as 1-bit", codec: Some(Codec::OneBit), ..PLAIN },
    Form { name: "gradients as top-k", codec: Some(Codec::TopK { fraction: 0.1 }), ..PLAIN },
    Form {
        name: "gradients beyond a threshold",
        codec: Some(Codec::Threshold { magnitude: 0.7 }),
        ..PLAIN
    },
    Form { name: "values as f16", values: Some(Codec::F16), ..PLAIN },
    Form { name: "values as bf16", values: Some(Codec::Bf16), ..PLAIN },
    Form { name: "values of f64 as bf16", values: Some(Codec::Bf16), dtype: DType::F64, ..PLAIN },
    Form { name: "variables of f16", dtype: DType::F16, ..PLAIN },
    Form { name: "variables of bf16", dtype: DType::Bf16, ..PLAIN },
    Form {
        name: "variables of bf16, gradients as int8",
        codec: Some(Codec::Int8),
        dtype: DType::Bf16,
        ..PLAIN
    },
];

#[test]
fn an_encoded_dense_step_makes_no_bulk_allocation() {
    let _exclusive = exclusive();
    let mut report = AllocationReport::default();
    // Long enough that encoded bodies, those of 1-bit apart, are pooled buffers.
    for &form in FORMS {
        for case in half_of_cases(20_001, counted_steps(100)) {
            let case = AllocationCase { form, ..case };
            report.add(&case, &dense::per_step(&case));
        }
    }
    report.end();
}

#[test]
fn an_encoded_step_with_rows_makes_no_bulk_allocation() {
    let _exclusive = exclusive();
    let mut report = AllocationReport::default();
    let for_rows = |form: &&Form| form.codec.is_none_or(|codec| codec.encoding().is_for_rows());
    for &form in FORMS.iter().filter(for_rows) {
        for case in half_of_cases(8, counted_steps(100)) {
            let case = AllocationCase { form, ..case };
            report.add(&case, &rows::per_step(&case));
        }
    }
    report.end();
}

/// How many steps are counted: `thorough` with `PUSHPULL_THOROUGH`, otherwise at most [`STEPS`].
fn counted_steps(thorough: usize) -> usize {
    match std::env::var_os("PUSHPULL_THOROUGH") {
        Some(_) => thorough,
        None => STEPS.min(thorough),
    }
}

/// Few steps, so that one round in [`ROUNDS_MAX`](counting) has none of the rare allocations.
const STEPS: usize = 50;

fn cases(elements: u64, steps: usize) -> impl Iterator<Item = AllocationCase> {
    let modes = [(false, 1), (false, 2), (true, 1), (true, 2)].into_iter();
    modes.flat_map(move |(synchronous, shards)| {
        [false, true].map(|unix| AllocationCase {
            synchronous,
            unix,
            shards,
            elements,
            steps,
            form: PLAIN,
        })
    })
}

/// Half of the cases: each mode with one shard and with two, each transport in each mode.
fn half_of_cases(elements: u64, steps: usize) -> impl Iterator<Item = AllocationCase> {
    cases(elements, steps).filter(|case| case.unix == (case.synchronous == (case.shards == 1)))
}

/// The counts of all cases.
#[derive(Default)]
struct AllocationReport(Vec<String>);

impl AllocationReport {
    /// Adds the bulk allocations of worker and servers in each kind of step.
    fn add(&mut self, case: &AllocationCase, counts: &[[f64; 2]]) {
        let line = format!("{case}: {counts:?}");
        println!("{line}");
        if counts.iter().flatten().any(|&each| each > RARE) {
            self.0.push(line);
        }
    }

    fn end(self) {
        let broken = self.0;
        assert!(broken.is_empty(), "bulk allocations of worker and servers in a step: {broken:#?}");
    }
}
