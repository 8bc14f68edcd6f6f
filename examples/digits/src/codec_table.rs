//! Trains with each codec and writes a table of bytes, time and accuracy into a document.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use pushpull::worker::{Codec, Interrupt};

use super::data::Split;
use super::options::DigitsOptions;
use super::output::print_error;
use super::task::TaskError;
use super::{TrainingRun, train_here};

/// The codecs that are compared.
const CODECS: [&str; 9] = [
    "none",
    "f16",
    "bf16",
    "int8",
    "onebit",
    "topk(0.1)",
    "topk(0.01)",
    "threshold(0.01)",
    "threshold(0.001)",
];

/// Number of seeds for each codec. The table has the medians.
const SEEDS: u64 = 3;

/// Trains with each codec and replaces the table of this dataset in the document: the lines between
/// `<!-- table: NAME -->` and `<!-- end -->`.
pub(crate) fn write(options: &DigitsOptions, split: &Split, path: &Path) -> Result<(), TaskError> {
    let document = fs::read_to_string(path)
        .map_err(|error| format!("--codec-table {}: {error}", path.display()))?;
    let name = if options.data.is_some() { "fashion-mnist" } else { "digits" };
    let begin = format!("<!-- table: {name} -->\n");
    let (before, rest) = document
        .split_once(&begin)
        .ok_or(format!("cannot write the table: no {begin:?} in {path:?}"))?;
    let (_, after) = rest
        .split_once("<!-- end -->")
        .ok_or(format!("cannot write the table: no end of {begin:?}"))?;
    let mut table = format!(
        "{} rows to train on, {} to test on, a network of {} parameters; {} steps of {} rows, \
         2 servers, {} workers.\n\n",
        split.train_rows,
        split.test.rows(),
        options.parameters(split),
        options.total_steps(split)?,
        options.rows(),
        options.workers(),
    );
    table.push_str("| codec | bytes a push | of none | ms a step | accuracy |\n");
    table.push_str("| --- | ---: | ---: | ---: | ---: |\n");
    let mut plain = None;
    for text in CODECS {
        let codec = if text == "none" { None } else { Some(text.parse::<Codec>()?) };
        let mut runs = Vec::new();
        for seed in options.seed..options.seed + SEEDS {
            let mut options = options.clone();
            options.codec = codec;
            options.seed = seed;
            let run = train_here(&options, split, &Interrupt::new())?;
            runs.push(run.ok_or("the training has no result")?);
        }
        let bytes = median(&runs, |run| run.push_bytes as f64 / run.outcome.steps as f64);
        let share = bytes / *plain.get_or_insert(bytes);
        let time = median(&runs, |run| 1e3 * run.elapsed.as_secs_f64() / run.outcome.steps as f64);
        let accuracy = median(&runs, |run| run.outcome.accuracy);
        writeln!(table, "| {text} | {bytes:.0} | {share:.3} | {time:.2} | {accuracy:.4} |")?;
        print_error(format_args!("{text}: {bytes:.0} bytes, {accuracy:.4}"));
    }
    fs::write(path, format!("{before}{begin}{table}<!-- end -->{after}"))?;
    Ok(())
}

fn median(runs: &[TrainingRun], of: impl Fn(&TrainingRun) -> f64) -> f64 {
    let mut values: Vec<f64> = runs.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
