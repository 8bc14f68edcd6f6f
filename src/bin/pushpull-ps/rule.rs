//! The flags of an update rule and its hyperparameters.

use std::sync::Arc;

use clap::{Args, ValueEnum};
use pushpull::optim::{
    Adadelta, Adagrad, AdamW, Ftrl, Lamb, Momentum, Optimizer, RmsProp, Schedule,
};
use pushpull::{Adam, Sgd};

use super::complaint::flag_called;
use super::schedule::ScheduleOption;

/// Flags of one update rule. An omitted hyperparameter has the default of the rule.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Optimizer")]
pub(crate) struct RuleOptions {
    /// Update rule of the variables, listed below
    #[arg(
        long,
        value_name = "NAME",
        value_enum,
        default_value_t = Rule::Sgd,
        hide_possible_values = true
    )]
    optimizer: Rule,
    /// Learning rate at the start of the schedule
    #[arg(long, value_name = "RATE", default_value_t = 0.01)]
    learning_rate: f64,
    /// Learning rate by step, listed below [default: constant]
    #[arg(long)]
    schedule: Option<ScheduleOption>,
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
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Rule {
    Sgd,
    Momentum,
    Nesterov,
    Adagrad,
    Adadelta,
    Rmsprop,
    Adam,
    #[value(name = "lazy_adam")]
    LazyAdam,
    Adamw,
    Lamb,
    Ftrl,
}

/// Returns a line for each rule, with the hyperparameters that it accepts.
pub(crate) fn optimizer_list() -> String {
    let line = |rule: &Rule| format!("  {:<10} {}\n", rule.name(), rule.flags().join(" "));
    Rule::value_variants().iter().map(line).collect()
}

impl Rule {
    /// Returns its name on the command line.
    fn name(self) -> String {
        let value = self.to_possible_value().expect("no rule is skipped");
        value.get_name().to_owned()
    }

    /// Returns the flags that the rule accepts in addition to the learning rate and its schedule.
    const fn flags(self) -> &'static [&'static str] {
        match self {
            Rule::Sgd => &["--weight-decay"],
            Rule::Momentum | Rule::Nesterov => &["--momentum", "--l2", "--weight-decay"],
            Rule::Adagrad => &["--initial-accumulator"],
            Rule::Adadelta => &["--rho", "--epsilon"],
            Rule::Rmsprop => &["--rho", "--momentum", "--epsilon", "--centered"],
            Rule::Adam => &["--beta1", "--beta2", "--epsilon", "--epsilon-after-correction"],
            Rule::LazyAdam => {
                &["--beta1", "--beta2", "--epsilon", "--epsilon-after-correction", "--row-counts"]
            }
            Rule::Adamw => {
                &["--beta1", "--beta2", "--epsilon", "--epsilon-after-correction", "--weight-decay"]
            }
            Rule::Lamb => &["--beta1", "--beta2", "--epsilon", "--weight-decay"],
            Rule::Ftrl => &[
                "--initial-accumulator",
                "--learning-rate-power",
                "--l1",
                "--l2",
                "--l2-shrinkage",
                "--beta",
            ],
        }
    }
}

impl RuleOptions {
    /// Builds the rule.
    ///
    /// # Errors
    /// Returns the text to print if a flag is given that the rule does not accept, since it would
    /// have no effect, or if a hyperparameter is out of range.
    pub(crate) fn optimizer(&self) -> Result<Arc<dyn Optimizer>, String> {
        self.check()?;
        let rate = self.rate();
        let rule: Arc<dyn Optimizer> = match self.optimizer {
            Rule::Sgd => Arc::new(self.sgd(rate)),
            Rule::Momentum => Arc::new(self.momentum(rate, Momentum::new)),
            Rule::Nesterov => Arc::new(self.momentum(rate, Momentum::nesterov)),
            Rule::Adagrad => Arc::new(self.adagrad(rate)),
            Rule::Adadelta => Arc::new(self.adadelta(rate)),
            Rule::Rmsprop => Arc::new(self.rmsprop(rate)),
            Rule::Adam => Arc::new(self.adam(rate)),
            Rule::LazyAdam if self.row_counts => Arc::new(self.adam(rate).lazy_with_row_counts()),
            Rule::LazyAdam => Arc::new(self.adam(rate).lazy()),
            Rule::Adamw => Arc::new(self.adamw(rate)),
            Rule::Lamb => Arc::new(self.lamb(rate)),
            Rule::Ftrl => Arc::new(self.ftrl(rate)),
        };
        match rule.fault() {
            None => Ok(rule),
            Some((name, value, reason)) => {
                Err(format!("{} {value}: {reason}", self.flag_of(name, value)))
            }
        }
    }

    /// Returns the flag that gave a hyperparameter of the rule this value.
    fn flag_of(&self, name: &str, value: f64) -> String {
        let is_first_rate = self.learning_rate == value || self.learning_rate.is_nan();
        match name {
            "decay" => "--rho".to_owned(),
            "learning_rate" if is_first_rate => "--learning-rate".to_owned(),
            "learning_rate" | "steps" | "decay_rate" | "decay_steps" => {
                "--schedule with".to_owned()
            }
            name => flag_called(name),
        }
    }

    fn rate(&self) -> Schedule {
        let rate = self.learning_rate;
        let schedule = self.schedule.as_ref().map(|schedule| schedule.starting_at(rate));
        schedule.unwrap_or(rate.into()).warm_up(self.warm_up)
    }

    /// Checks that the rule accepts every flag that is given.
    fn check(&self) -> Result<(), String> {
        let given = [
            ("--momentum", self.momentum.is_some()),
            ("--rho", self.rho.is_some()),
            ("--centered", self.centered),
            ("--beta1", self.beta1.is_some()),
            ("--beta2", self.beta2.is_some()),
            ("--epsilon", self.epsilon.is_some()),
            ("--epsilon-after-correction", self.epsilon_after_correction),
            ("--row-counts", self.row_counts),
            ("--weight-decay", self.weight_decay.is_some()),
            ("--initial-accumulator", self.initial_accumulator.is_some()),
            ("--learning-rate-power", self.learning_rate_power.is_some()),
            ("--l1", self.l1.is_some()),
            ("--l2", self.l2.is_some()),
            ("--l2-shrinkage", self.l2_shrinkage.is_some()),
            ("--beta", self.beta.is_some()),
        ];
        let takes = self.optimizer.flags();
        let Some((flag, _)) = given.iter().find(|(flag, given)| *given && !takes.contains(flag))
        else {
            return Ok(());
        };
        let takes = [&["--learning-rate", "--schedule", "--warm-up"], takes].concat().join(", ");
        Err(format!("--optimizer {} does not take {flag}, only {takes}", self.optimizer.name()))
    }

    fn sgd(&self, rate: impl Into<Schedule>) -> Sgd {
        with(Sgd::new(rate), self.weight_decay, Sgd::weight_decay)
    }

    fn momentum(&self, rate: Schedule, new: fn(Schedule, f64) -> Momentum) -> Momentum {
        let rule = new(rate, self.momentum.unwrap_or_default());
        let rule = with(rule, self.l2, Momentum::l2);
        with(rule, self.weight_decay, Momentum::weight_decay)
    }

    fn adagrad(&self, rate: impl Into<Schedule>) -> Adagrad {
        with(Adagrad::new(rate), self.initial_accumulator, Adagrad::initial_accumulator)
    }

    fn adadelta(&self, rate: impl Into<Schedule>) -> Adadelta {
        let rule = with(Adadelta::new(rate), self.rho, Adadelta::rho);
        with(rule, self.epsilon, Adadelta::epsilon)
    }

    fn rmsprop(&self, rate: impl Into<Schedule>) -> RmsProp {
        let rule = with(RmsProp::new(rate), self.rho, RmsProp::decay);
        let rule = with(rule, self.momentum, RmsProp::momentum);
        let rule = with(rule, self.epsilon, RmsProp::epsilon);
        if self.centered { rule.centered() } else { rule }
    }

    fn betas(&self) -> (f64, f64) {
        (self.beta1.unwrap_or(0.9), self.beta2.unwrap_or(0.999))
    }

    fn adam(&self, rate: impl Into<Schedule>) -> Adam {
        let (beta1, beta2) = self.betas();
        let rule = with(Adam::new(rate).betas(beta1, beta2), self.epsilon, Adam::epsilon);
        if self.epsilon_after_correction { rule.epsilon_after_correction() } else { rule }
    }

    fn adamw(&self, rate: impl Into<Schedule>) -> AdamW {
        let (beta1, beta2) = self.betas();
        let rule = with(AdamW::new(rate).betas(beta1, beta2), self.epsilon, AdamW::epsilon);
        let rule = with(rule, self.weight_decay, AdamW::weight_decay);
        if self.epsilon_after_correction { rule.epsilon_after_correction() } else { rule }
    }

    fn lamb(&self, rate: impl Into<Schedule>) -> Lamb {
        let (beta1, beta2) = self.betas();
        let rule = with(Lamb::new(rate).betas(beta1, beta2), self.epsilon, Lamb::epsilon);
        with(rule, self.weight_decay, Lamb::weight_decay)
    }

    fn ftrl(&self, rate: impl Into<Schedule>) -> Ftrl {
        let rule = with(Ftrl::new(rate), self.initial_accumulator, Ftrl::initial_accumulator);
        let rule = with(rule, self.learning_rate_power, Ftrl::learning_rate_power);
        let rule = with(rule, self.l1, Ftrl::l1);
        let rule = with(rule, self.l2, Ftrl::l2);
        let rule = with(rule, self.l2_shrinkage, Ftrl::l2_shrinkage);
        with(rule, self.beta, Ftrl::beta)
    }
}

/// Sets a hyperparameter of a rule if a value is given.
fn with<R>(rule: R, value: Option<f64>, set: fn(R, f64) -> R) -> R {
    match value {
        Some(value) => set(rule, value),
        None => rule,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct RuleFlags {
        #[command(flatten)]
        rule: RuleOptions,
    }

    /// Returns a valid value for a flag that takes one.
    const fn value(flag: &str) -> Option<&'static str> {
        match flag.as_bytes() {
            b"--centered" | b"--epsilon-after-correction" | b"--row-counts" => None,
            b"--learning-rate-power" => Some("-0.25"),
            _ => Some("0.25"),
        }
    }

    fn parsed<'a>(
        arguments: impl IntoIterator<Item = &'a str>,
    ) -> Result<RuleOptions, clap::Error> {
        let line = ["pushpull-ps"].into_iter().chain(arguments);
        RuleFlags::try_parse_from(line).map(|line| line.rule)
    }

    fn rules() -> impl Iterator<Item = (&'static str, Rule)> {
        let name = |rule: &Rule| rule.to_possible_value().unwrap().get_name().to_owned();
        Rule::value_variants().iter().map(move |&rule| (&*name(&rule).leak(), rule))
    }

    #[test]
    fn a_rule_accepts_only_its_own_flags() {
        let all: Vec<&str> = rules().flat_map(|(_, rule)| rule.flags()).copied().collect();
        for (name, rule) in rules() {
            for &flag in &all {
                let mut line = vec!["--optimizer", name, "--learning-rate", "0.5", flag];
                line.extend(value(flag));
                if rule.flags().contains(&"--momentum") && flag != "--momentum" {
                    line.extend(["--momentum", "0.5"]);
                }
                let checked = parsed(line).unwrap().check();
                if rule.flags().contains(&flag) {
                    assert_eq!(checked, Ok(()), "{name} {flag}");
                } else {
                    let error = checked.unwrap_err();
                    assert!(error.contains(name) && error.contains(flag), "{error}");
                }
            }
        }
    }

    #[test]
    fn an_invalid_value_is_reported_with_its_flag() {
        let momentum = ["--optimizer", "momentum", "--momentum"];
        for (line, expected) in [
            (&["--learning-rate=-1"][..], "--learning-rate -1: "),
            (&["--learning-rate=nan"], "--learning-rate NaN: "),
            (&["--schedule=cosine:-1/5"], "--schedule with -1: "),
            (&["--schedule=cosine:0/0"], "--schedule with 0: "),
            (&["--schedule=steps:9=0.5,3=0.1"], "--schedule with 3: steps must rise"),
            (&["--schedule=staircase:2/5"], "--schedule with 2: "),
            (&[&momentum[..], &["1"]].concat(), "--momentum 1: "),
            (&["--optimizer=rmsprop", "--rho=1"], "--rho 1: "),
            (&["--optimizer=adam", "--beta1=2"], "--beta1 2: "),
            (&["--optimizer=ftrl", "--learning-rate-power=1"], "--learning-rate-power 1: "),
        ] {
            let error = parsed(line.iter().copied()).unwrap().optimizer().unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn the_rate_follows_its_schedule() {
        assert_eq!(parsed([]).unwrap().rate(), 0.01.into());
        let line = ["--learning-rate", "0.5", "--schedule", "cosine:0.1/100", "--warm-up", "7"];
        let expected = Schedule::cosine(0.5, 0.1, 100).warm_up(7);
        assert_eq!(parsed(line).unwrap().rate(), expected);
    }

    #[test]
    fn momentum_has_no_default() {
        for rule in ["momentum", "nesterov"] {
            let error = parsed(["--optimizer", rule]).unwrap_err().to_string();
            assert!(error.contains("--momentum"), "{error}");
        }
    }

    #[test]
    fn every_hyperparameter_reaches_its_rule() {
        let given = |flags: &'static [&'static str]| {
            let line = flags.iter().flat_map(|&flag| [flag].into_iter().chain(value(flag)));
            parsed(line).unwrap()
        };
        let options = given(Rule::Ftrl.flags());
        let ftrl = Ftrl::new(0.5).initial_accumulator(0.25).learning_rate_power(-0.25);
        assert_eq!(options.ftrl(0.5), ftrl.l1(0.25).l2(0.25).l2_shrinkage(0.25).beta(0.25));
        let options = given(Rule::Sgd.flags());
        assert_eq!(options.sgd(0.5), Sgd::new(0.5).weight_decay(0.25));
        let options = given(Rule::Momentum.flags());
        let momentum = Momentum::new(0.5, 0.25).l2(0.25).weight_decay(0.25);
        assert_eq!(options.momentum(0.5.into(), Momentum::new), momentum);
        let options = given(Rule::Rmsprop.flags());
        let rmsprop = RmsProp::new(0.5).decay(0.25).momentum(0.25).epsilon(0.25).centered();
        assert_eq!(options.rmsprop(0.5), rmsprop);
        let options = given(Rule::Adamw.flags());
        let adamw = AdamW::new(0.5).betas(0.25, 0.25).epsilon(0.25).weight_decay(0.25);
        assert_eq!(options.adamw(0.5), adamw.epsilon_after_correction());
        let lamb = Lamb::new(0.5).betas(0.25, 0.25).epsilon(0.25).weight_decay(0.25);
        assert_eq!(options.lamb(0.5), lamb);
        let options = given(Rule::Adam.flags());
        let adam = Adam::new(0.5).betas(0.25, 0.25).epsilon(0.25).epsilon_after_correction();
        assert_eq!(options.adam(0.5), adam);
        let kind =
            |line: &[&str]| parsed(line.iter().copied()).unwrap().optimizer().unwrap().kind();
        assert_eq!(kind(&["--optimizer=lazy_adam"]), "lazy_adam");
        assert_eq!(kind(&["--optimizer=lazy_adam", "--row-counts"]), "lazy_adam_row_counts");
        let options = given(Rule::Adadelta.flags());
        assert_eq!(options.adadelta(0.5), Adadelta::new(0.5).rho(0.25).epsilon(0.25));
        let options = given(Rule::Adagrad.flags());
        assert_eq!(options.adagrad(0.5), Adagrad::new(0.5).initial_accumulator(0.25));
    }

    #[test]
    fn an_omitted_hyperparameter_has_the_default_of_the_rule() {
        let options = parsed([]).unwrap();
        assert_eq!(options.adam(0.5), Adam::new(0.5));
        assert_eq!(options.adamw(0.5), AdamW::new(0.5));
        assert_eq!(options.lamb(0.5), Lamb::new(0.5));
        assert_eq!(options.adagrad(0.5), Adagrad::new(0.5));
        assert_eq!(options.adadelta(0.5), Adadelta::new(0.5));
        assert_eq!(options.rmsprop(0.5), RmsProp::new(0.5));
        assert_eq!(options.ftrl(0.5), Ftrl::new(0.5));
    }
}
