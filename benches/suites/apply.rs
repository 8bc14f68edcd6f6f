//! Suite `apply`: each update rule through the store, interleaved with the rule in place. The
//! difference is the cost of a commit.

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use pushpull::optim::{Adadelta, Adagrad, AdamW, Ftrl, Lamb, Momentum, Optimizer, RmsProp};
use pushpull::{Adam, Sgd};
use pushpull_ps::measure::{InPlace, StoreUnderTest};

use crate::bench::bytes_of;
use crate::bench::report::{Report, Row, Unit};
use crate::bench::turns::{Pace, interleave};

/// Ratio to the ceiling below which the suite fails: no ordinary slowdown is that large.
const RATIO_MIN: f64 = 0.25;

/// Returns every rule, the plain ones first.
pub(crate) fn every_rule() -> [Arc<dyn Optimizer>; 11] {
    [
        Arc::new(Sgd::new(0.5)),
        Arc::new(Adam::default()),
        Arc::new(Momentum::new(0.5, 0.9)),
        Arc::new(Momentum::nesterov(0.5, 0.9)),
        Arc::new(Adagrad::new(0.5)),
        Arc::new(Adadelta::default()),
        Arc::new(RmsProp::new(0.001).momentum(0.9)),
        Arc::new(RmsProp::new(0.001).momentum(0.9).centered()),
        Arc::new(AdamW::default()),
        Arc::new(Lamb::default()),
        Arc::new(Ftrl::new(0.5).l1(0.1).l2(0.1)),
    ]
}

/// Measures these rules over a variable of each of these sizes.
pub(crate) fn run(
    rules: &[Arc<dyn Optimizer>],
    sizes: &[impl AsRef<str>],
    pace: Pace,
    report: &mut Report,
) -> Result<(), Box<dyn Error>> {
    for size in sizes.iter().map(AsRef::as_ref) {
        run_size(rules, size, pace, report)?;
    }
    Ok(())
}

fn run_size(
    rules: &[Arc<dyn Optimizer>],
    size: &str,
    pace: Pace,
    report: &mut Report,
) -> Result<(), Box<dyn Error>> {
    let bytes = bytes_of(size)?;
    for rule in rules {
        let name = rule.kind();
        let elements = bytes / 4;
        let gradient = vec![1.0_f32; elements];
        let mut store = StoreUnderTest::new(elements as u64, rule.clone())?;
        let mut in_place = InPlace::new(elements, rule.clone())?;
        let ours = || {
            let start = Instant::now();
            store.push(&gradient);
            Ok(start.elapsed())
        };
        let theirs = || {
            let start = Instant::now();
            in_place.push(&gradient);
            Ok(start.elapsed())
        };
        let (ours, ceiling) = interleave(pace, ours, theirs)?;
        // The two sides ran for the same time, not the same number of pushes. The one behind
        // catches up, and then their values are equal.
        let mut a = ours.iter().flatten().count();
        let mut b = ceiling.iter().flatten().count();
        while a != b {
            if a < b {
                store.push(&gradient);
                a += 1;
            } else {
                in_place.push(&gradient);
                b += 1;
            }
        }
        if store.values() != in_place.values()[..elements] {
            return Err(
                format!("the values of {name} differ from those of the rule in place").into()
            );
        }
        let row = format!("apply_{name}_{size}");
        let unit = Unit::Throughput;
        let amount = bytes as u64;
        let ceiling_name = "the rule in place";
        let line = report.row(Row { name: row, unit, amount, ours, ceiling, ceiling_name })?;
        // Streams at the same offset modulo a page evict each other, which is 6 to 7 times slower.
        // So is a loop in cache whose vectors span lines.
        if line.ratio().is_some_and(|ratio| ratio < RATIO_MIN) {
            let cause = "the streams are not skewed, or the loop gathers its vectors";
            return Err(format!("{name} at {size}: {cause}").into());
        }
    }
    Ok(())
}
