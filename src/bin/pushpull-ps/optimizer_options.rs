//! The flags of update rules and their hyperparameters.

use clap::Args;
use clap::builder::PossibleValuesParser;
use pushpull::job::OPTIMIZERS;

/// Update rule of all variables, with exceptions for some. An omitted hyperparameter has the default
/// of the rule.
#[derive(Debug, Args)]
#[command(next_help_heading = "Optimizer")]
pub(crate) struct OptimizerOptions {
    /// Update rule of the variables, listed below
    #[arg(
        long,
        value_name = "NAME",
        value_parser = PossibleValuesParser::new(OPTIMIZERS),
        default_value = OPTIMIZERS[0],
        hide_possible_values = true
    )]
    optimizer: String,
    /// Learning rate at the start of the schedule
    #[arg(long, value_name = "RATE", default_value_t = 0.01)]
    learning_rate: f64,
    /// Learning rate by step, listed below [default: constant]
    #[arg(long)]
    schedule: Option<String>,
    /// Steps of linear rise before the schedule
    #[arg(long, value_name = "STEPS", default_value_t = 0)]
    warm_up: u64,
    /// Share of the momentum kept; required by momentum and nesterov [rmsprop: 0]
    #[arg(
        long,
        value_name = "SHARE",
        required_if_eq_any([("optimizer", "momentum"), ("optimizer", "nesterov")]),
    )]
    momentum: Option<f64>,
    /// Share of the mean square kept [default: 0.9; adadelta: 0.95]
    #[arg(long, value_name = "SHARE")]
    rho: Option<f64>,
    /// Divide by the root of the variance, not the mean square
    #[arg(long)]
    centered: bool,
    /// Decay of the first moment [default: 0.9]
    #[arg(long, value_name = "DECAY")]
    beta1: Option<f64>,
    /// Decay of the second moment [default: 0.999]
    #[arg(long, value_name = "DECAY")]
    beta2: Option<f64>,
    /// Added to divisors [default: 1e-8; adamw: 1e-7, lamb: 1e-6, rmsprop: 1e-10]
    #[arg(long, value_name = "TERM")]
    epsilon: Option<f64>,
    /// Add epsilon to the root of the corrected moment, as PyTorch does
    #[arg(long)]
    epsilon_after_correction: bool,
    /// Count the gradients of each row, not those of the training
    #[arg(long)]
    row_counts: bool,
    /// Share of a weight removed at learning rate 1 [default: 0; adamw: 0.004]
    #[arg(long, value_name = "SHARE")]
    weight_decay: Option<f64>,
    /// Initial sum of squares [default: 0.1]
    #[arg(long, value_name = "SUM")]
    initial_accumulator: Option<f64>,
    /// Power of the sum of squares by which steps shrink [default: -0.5]
    #[arg(long, value_name = "POWER", allow_negative_numbers = true)]
    learning_rate_power: Option<f64>,
    /// Sum of gradients below which a weight stays zero [default: 0]
    #[arg(long, value_name = "SUM")]
    l1: Option<f64>,
    /// Factor of w^2 (ftrl) or w^2 / 2 in the loss [default: 0]
    #[arg(long, value_name = "FACTOR")]
    l2: Option<f64>,
    /// Penalty of --l2 that is left out of the sum of squares [default: 0]
    #[arg(long, value_name = "FACTOR")]
    l2_shrinkage: Option<f64>,
    /// Added to the root of the sum of squares [default: 0]
    #[arg(long, value_name = "TERM")]
    beta: Option<f64>,
    /// Update rule of some variables: 'emb/*=adagrad --learning-rate 0.1'
    #[arg(long, value_name = "NAMES=RULE")]
    optimizer_for: Vec<String>,
    /// Factor of the rate of some variables: 'bias*=0.5'
    #[arg(long, value_name = "NAMES=FACTOR")]
    rate_for: Vec<String>,
}
