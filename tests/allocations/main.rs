//! What a step of training allocates: nothing, on either side, in whatever form gradients and values travel.
//!
//! Every allocation is counted for the thread that makes it, so that the caller, the session's thread
//! and the shards' are told apart.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod cluster;
mod counting;
mod dense;
mod rows;

use cluster::{AS_IT_IS, Case, Form};
use counting::{ONCE_IN_A_WHILE, alone};
use pushpull::{Codec, DType};

#[test]
fn a_step_allocates_nothing() {
    let _alone = alone();
    println!("up to {} steps of each kind are counted in a round", counted_steps(1_000));
    let mut told = Told::default();
    // In one part for each shard, and in several.
    for (elements, steps) in [(1_001, counted_steps(1_000)), (150_001, counted_steps(200))] {
        for case in cases(elements, steps) {
            told.add(&case, &dense::per_step(&case));
        }
    }
    told.end();
}

#[test]
fn a_step_with_rows_allocates_nothing() {
    let _alone = alone();
    let mut told = Told::default();
    for case in cases(8, counted_steps(300)) {
        told.add(&case, &rows::per_step(&case));
    }
    told.end();
}

/// The forms in which gradients and values travel, but for the usual one. Where it depends on a gradient how
/// much of it is sent, what is kept is as long as the longest of late.
const FORMS: &[Form] = &[
    Form { name: "gradients as f16", codec: Some(Codec::F16), ..AS_IT_IS },
    Form { name: "gradients as bf16", codec: Some(Codec::Bf16), ..AS_IT_IS },
    Form { name: "gradients as int8", codec: Some(Codec::Int8), ..AS_IT_IS },
    Form {
        name: "gradients of f64 as int8",
        codec: Some(Codec::Int8),
        dtype: DType::F64,
        ..AS_IT_IS
    },
    Form { name: "gradients as 1-bit", codec: Some(Codec::OneBit), ..AS_IT_IS },
    Form { name: "gradients as top-k", codec: Some(Codec::TopK { fraction: 0.1 }), ..AS_IT_IS },
    Form {
        name: "gradients beyond a threshold",
        codec: Some(Codec::Threshold { magnitude: 0.7 }),
        ..AS_IT_IS
    },
    Form { name: "values as f16", values: Some(Codec::F16), ..AS_IT_IS },
    Form { name: "values as bf16", values: Some(Codec::Bf16), ..AS_IT_IS },
    Form {
        name: "values of f64 as bf16",
        values: Some(Codec::Bf16),
        dtype: DType::F64,
        ..AS_IT_IS
    },
    Form { name: "variables of f16", dtype: DType::F16, ..AS_IT_IS },
    Form { name: "variables of bf16", dtype: DType::Bf16, ..AS_IT_IS },
    Form {
        name: "variables of bf16, gradients as int8",
        codec: Some(Codec::Int8),
        dtype: DType::Bf16,
        ..AS_IT_IS
    },
];

#[test]
fn a_step_in_another_form_allocates_nothing() {
    let _alone = alone();
    let mut told = Told::default();
    for &form in FORMS {
        for case in some(1_001, counted_steps(100)) {
            let case = Case { form, ..case };
            told.add(&case, &dense::per_step(&case));
        }
    }
    told.end();
}

#[test]
fn a_step_with_rows_in_another_form_allocates_nothing() {
    let _alone = alone();
    let mut told = Told::default();
    let for_rows = |form: &&Form| form.codec.is_none_or(|codec| codec.encoding().is_for_rows());
    for &form in FORMS.iter().filter(for_rows) {
        for case in some(8, counted_steps(100)) {
            let case = Case { form, ..case };
            told.add(&case, &rows::per_step(&case));
        }
    }
    told.end();
}

/// How many steps are counted: these in a thorough run, and otherwise as many as show an allocation that
/// not every step makes.
fn counted_steps(thorough: usize) -> usize {
    match std::env::var_os("PUSHPULL_THOROUGH") {
        Some(_) => thorough,
        None => STEPS.min(thorough),
    }
}

/// Few, so that in one of the rounds there must be none.
const STEPS: usize = 50;

fn cases(elements: u64, steps: usize) -> impl Iterator<Item = Case> {
    let modes = [(false, 1), (false, 2), (true, 1), (true, 2)].into_iter();
    modes.flat_map(move |(synchronous, shards)| {
        [false, true].map(|unix| Case {
            synchronous,
            unix,
            shards,
            elements,
            steps,
            form: AS_IT_IS,
        })
    })
}

/// As many of them as have each mode with one shard and with two, and with each transport.
fn some(elements: u64, steps: usize) -> impl Iterator<Item = Case> {
    cases(elements, steps).filter(|case| case.unix == (case.synchronous == (case.shards == 1)))
}

/// What was counted, case by case.
#[derive(Default)]
struct Told(Vec<String>);

impl Told {
    /// What worker and servers have allocated in each kind of step.
    fn add(&mut self, case: &Case, counts: &[[f64; 2]]) {
        let told = format!("{case}: {counts:?}");
        println!("{told}");
        if counts.iter().flatten().any(|&each| each > ONCE_IN_A_WHILE) {
            self.0.push(told);
        }
    }

    fn end(self) {
        let broken = self.0;
        assert!(broken.is_empty(), "allocations of worker and servers in a step: {broken:#?}");
    }
}
