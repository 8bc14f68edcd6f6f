//! Learns which flights will be late, from ids alone: a table with a row for each.

mod data;
mod metrics;
mod model;
mod options;
#[path = "../digits/random.rs"]
mod random;
mod reference;
mod score;
mod variables;

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;

use data::{Epoch, FIELDS, Split};
use model::{Logistic, Model, Network};
use options::{Kind, Options};
use reference::Reference;
use variables::Variables;

fn main() -> ExitCode {
    let options = Options::parse();
    let result = match options.model {
        Kind::Logistic => run(&options, Logistic::new(FIELDS)),
        Kind::Network => run(&options, Network::new(FIELDS, EMBEDDING_WIDTH, HIDDEN_UNITS)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("flights: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Trains a model, and prints how good it is after each epoch.
fn run<M: Model<N>, const N: usize>(options: &Options, model: M) -> Result<(), Box<dyn Error>> {
    let split = Split::open(&options.data)?;
    let start = Instant::now();
    let variables = Variables::of(&model, split.ids, 1, options.seed)?;
    let mut reference = Reference::new(model, &variables, options.learning_rate);
    println!("epoch     AUC  log-loss");
    for index in 0..options.epochs.get() {
        let epoch = Epoch::new(split.train.rows(), options.batch, options.seed, index);
        reference.train(&split.train, &epoch);
        let score = reference.score(&split.test).ok_or("the training has diverged")?;
        println!("{:5}  {:.4}    {:.4}", index + 1, score.auc, score.log_loss);
    }
    println!("{:.2} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// Values in an embedding of [`Network`].
const EMBEDDING_WIDTH: usize = 8;

/// Units in the hidden layer of [`Network`].
const HIDDEN_UNITS: usize = 32;
