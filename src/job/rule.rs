//! Builds update rules from the settings of an optimizer, for all variables and for some of them.

use std::str::FromStr;
use std::sync::Arc;

use pushpull_ps::optim::{
    Adadelta, Adagrad, AdamW, Ftrl, Lamb, Momentum, Optimizer, RmsProp, Schedule,
};
use pushpull_ps::{Adam, Sgd};

use super::error::JobError;
use super::keys::{Kind, key_of};
use super::schedule::ScheduleSetting;
use super::settings::Settings;

/// The names of the rules.
pub const OPTIMIZERS: [&str; 11] = [
    "sgd",
    "momentum",
    "nesterov",
    "adagrad",
    "adadelta",
    "rmsprop",
    "adam",
    "lazy_adam",
    "adamw",
    "lamb",
    "ftrl",
];

/// The learning rate where none is set.
const LEARNING_RATE: f64 = 0.01;

/// The hyperparameters that some rules accept.
const HYPERPARAMETERS: [&str; 15] = [
    "momentum",
    "rho",
    "centered",
    "beta1",
    "beta2",
    "epsilon",
    "epsilon-after-correction",
    "row-counts",
    "weight-decay",
    "initial-accumulator",
    "learning-rate-power",
    "l1",
    "l2",
    "l2-shrinkage",
    "beta",
];

/// Returns the hyperparameters that a rule accepts in addition to the learning rate and its schedule;
/// `None` if there is no such rule.
fn hyperparameters(rule: &str) -> Option<&'static [&'static str]> {
    Some(match rule {
        "sgd" => &["weight-decay"],
        "momentum" | "nesterov" => &["momentum", "l2", "weight-decay"],
        "adagrad" => &["initial-accumulator"],
        "adadelta" => &["rho", "epsilon"],
        "rmsprop" => &["rho", "momentum", "epsilon", "centered"],
        "adam" => &["beta1", "beta2", "epsilon", "epsilon-after-correction"],
        "lazy_adam" => &["beta1", "beta2", "epsilon", "epsilon-after-correction", "row-counts"],
        "adamw" => &["beta1", "beta2", "epsilon", "epsilon-after-correction", "weight-decay"],
        "lamb" => &["beta1", "beta2", "epsilon", "weight-decay"],
        "ftrl" => {
            &["initial-accumulator", "learning-rate-power", "l1", "l2", "l2-shrinkage", "beta"]
        }
        _ => return None,
    })
}

/// Returns a line for each rule, with the flags that it accepts in addition to those of the learning
/// rate.
pub fn optimizer_list() -> String {
    let line = |rule: &&str| {
        let flags = hyperparameters(rule).unwrap_or_default().iter();
        let flags: Vec<_> = flags.map(|flag| format!("--{flag}")).collect();
        format!("  {rule:<10} {}\n", flags.join(" "))
    };
    OPTIMIZERS.iter().map(line).collect()
}

/// Builds the rule of these settings.
///
/// # Errors
/// If the rule does not accept a setting, which would have no effect, or a hyperparameter is out of
/// range.
pub(super) fn optimizer(settings: &Settings) -> Result<Arc<dyn Optimizer>, JobError> {
    let name = settings.text("optimizer").unwrap_or(OPTIMIZERS[0]);
    let Some(accepted) = hyperparameters(name) else {
        let known = OPTIMIZERS.join(", ");
        return Err(settings.fault("optimizer", format_args!("expected one of {known}")));
    };
    check_accepted(settings, name, accepted)?;
    let rule = Hyperparameters::of(settings)?.rule(name, settings)?;
    match rule.fault() {
        None => Ok(rule),
        Some((name, value, reason)) => Err(out_of_range(settings, name, value, reason)),
    }
}

/// Checks that a rule accepts every hyperparameter that is set, and has those that it needs.
fn check_accepted(settings: &Settings, rule: &str, accepted: &[&str]) -> Result<(), JobError> {
    let unused = |flag: &&&str| settings.is_given(flag) && !accepted.contains(flag);
    if let Some(flag) = HYPERPARAMETERS.iter().find(unused) {
        let all = ["learning-rate", "schedule", "warm-up"].iter().chain(accepted);
        let all: Vec<_> = all.map(|flag| format!("--{flag}")).collect();
        let reason = format!("--optimizer {rule} does not take --{flag}, only {}", all.join(", "));
        return Err(settings.fault(flag, reason));
    }
    match ["momentum", "nesterov"].contains(&rule) && !settings.is_given("momentum") {
        true => Err(settings.fault("optimizer", "it needs --momentum")),
        false => Ok(()),
    }
}

/// Returns the error of a hyperparameter that a rule found to be out of range.
fn out_of_range(settings: &Settings, name: &str, value: f64, reason: &str) -> JobError {
    let rate = settings.value::<f64>("learning-rate").ok().flatten().unwrap_or(LEARNING_RATE);
    let is_first_rate = rate == value || rate.is_nan();
    let flag = match name {
        "decay" => "rho".to_owned(),
        "learning_rate" if is_first_rate => "learning-rate".to_owned(),
        "learning_rate" | "steps" | "decay_rate" | "decay_steps" => "schedule".to_owned(),
        name => name.replace('_', "-"),
    };
    // The value is one of several in a schedule.
    match flag == "schedule" {
        true => settings.fault(&flag, format_args!("{value}: {reason}")),
        false => settings.fault(&flag, reason),
    }
}

/// The numbers of a rule, where they are set.
struct Hyperparameters {
    rate: Schedule,
    momentum: Option<f64>,
    rho: Option<f64>,
    betas: (f64, f64),
    epsilon: Option<f64>,
    weight_decay: Option<f64>,
    initial_accumulator: Option<f64>,
}

impl Hyperparameters {
    fn of(settings: &Settings) -> Result<Hyperparameters, JobError> {
        let number = |flag| settings.value::<f64>(flag);
        Ok(Hyperparameters {
            rate: rate(settings)?,
            momentum: number("momentum")?,
            rho: number("rho")?,
            betas: (number("beta1")?.unwrap_or(0.9), number("beta2")?.unwrap_or(0.999)),
            epsilon: number("epsilon")?,
            weight_decay: number("weight-decay")?,
            initial_accumulator: number("initial-accumulator")?,
        })
    }

    /// Builds the rule of this name, one of [`OPTIMIZERS`].
    fn rule(self, name: &str, settings: &Settings) -> Result<Arc<dyn Optimizer>, JobError> {
        let is_on = |flag| settings.is_given(flag);
        Ok(match name {
            "momentum" => Arc::new(self.momentum(Momentum::new, settings)?),
            "nesterov" => Arc::new(self.momentum(Momentum::nesterov, settings)?),
            "adagrad" => {
                let rule = Adagrad::new(self.rate);
                Arc::new(with(rule, self.initial_accumulator, Adagrad::initial_accumulator))
            }
            "adadelta" => {
                let rule = with(Adadelta::new(self.rate), self.rho, Adadelta::rho);
                Arc::new(with(rule, self.epsilon, Adadelta::epsilon))
            }
            "rmsprop" => {
                let rule = with(RmsProp::new(self.rate), self.rho, RmsProp::decay);
                let rule = with(rule, self.momentum, RmsProp::momentum);
                let rule = with(rule, self.epsilon, RmsProp::epsilon);
                Arc::new(if is_on("centered") { rule.centered() } else { rule })
            }
            "adam" => Arc::new(self.adam(settings)),
            "lazy_adam" if is_on("row-counts") => {
                Arc::new(self.adam(settings).lazy_with_row_counts())
            }
            "lazy_adam" => Arc::new(self.adam(settings).lazy()),
            "adamw" => {
                let rule = AdamW::new(self.rate).betas(self.betas.0, self.betas.1);
                let rule = with(rule, self.epsilon, AdamW::epsilon);
                let rule = with(rule, self.weight_decay, AdamW::weight_decay);
                let after = is_on("epsilon-after-correction");
                Arc::new(if after { rule.epsilon_after_correction() } else { rule })
            }
            "lamb" => {
                let rule = Lamb::new(self.rate).betas(self.betas.0, self.betas.1);
                let rule = with(rule, self.epsilon, Lamb::epsilon);
                Arc::new(with(rule, self.weight_decay, Lamb::weight_decay))
            }
            "ftrl" => Arc::new(self.ftrl(settings)?),
            _ => Arc::new(with(Sgd::new(self.rate), self.weight_decay, Sgd::weight_decay)),
        })
    }

    fn momentum(
        self,
        new: fn(Schedule, f64) -> Momentum,
        settings: &Settings,
    ) -> Result<Momentum, JobError> {
        let rule = new(self.rate, self.momentum.unwrap_or_default());
        let rule = with(rule, settings.value("l2")?, Momentum::l2);
        Ok(with(rule, self.weight_decay, Momentum::weight_decay))
    }

    fn adam(self, settings: &Settings) -> Adam {
        let rule = Adam::new(self.rate).betas(self.betas.0, self.betas.1);
        let rule = with(rule, self.epsilon, Adam::epsilon);
        match settings.is_given("epsilon-after-correction") {
            true => rule.epsilon_after_correction(),
            false => rule,
        }
    }

    fn ftrl(self, settings: &Settings) -> Result<Ftrl, JobError> {
        let rule = with(Ftrl::new(self.rate), self.initial_accumulator, Ftrl::initial_accumulator);
        let rule = with(rule, settings.value("learning-rate-power")?, Ftrl::learning_rate_power);
        let rule = with(rule, settings.value("l1")?, Ftrl::l1);
        let rule = with(rule, settings.value("l2")?, Ftrl::l2);
        let rule = with(rule, settings.value("l2-shrinkage")?, Ftrl::l2_shrinkage);
        Ok(with(rule, settings.value("beta")?, Ftrl::beta))
    }
}

/// Returns the learning rate by step.
fn rate(settings: &Settings) -> Result<Schedule, JobError> {
    let rate = settings.value("learning-rate")?.unwrap_or(LEARNING_RATE);
    let schedule = settings.value::<ScheduleSetting>("schedule")?;
    let schedule = schedule.map(|schedule| schedule.starting_at(rate));
    let warm_up = settings.value("warm-up")?.unwrap_or(0);
    Ok(schedule.unwrap_or(rate.into()).warm_up(warm_up))
}

/// Sets a hyperparameter of a rule if a value is given.
fn with<R>(rule: R, value: Option<f64>, set: fn(R, f64) -> R) -> R {
    match value {
        Some(value) => set(rule, value),
        None => rule,
    }
}

/// The rule of some variables: `NAMES=RULE`, where `RULE` is a name with its flags.
#[derive(Clone, Debug)]
pub(super) struct RuleFor {
    pub(super) names: String,
    pub(super) optimizer: Arc<dyn Optimizer>,
}

impl FromStr for RuleFor {
    type Err = String;

    fn from_str(text: &str) -> Result<RuleFor, String> {
        let (names, rule) = text.split_once('=').ok_or("no '=' after the names")?;
        let mut words = rule.split_whitespace();
        let mut settings = Settings::default();
        settings.set_flag("optimizer", [words.next().ok_or("no rule after the names")?]);
        while let Some(word) = words.next() {
            let (flag, value) = match word.split_once('=') {
                Some((flag, value)) => (flag, Some(value)),
                None => (word, None),
            };
            let name = flag.strip_prefix("--").map(|name| name.replace('_', "-"));
            let is_of_rule = |name: &str| {
                let of_rate = ["learning-rate", "schedule", "warm-up"].contains(&name);
                of_rate || HYPERPARAMETERS.contains(&name)
            };
            let key = name.filter(|name| is_of_rule(name)).and_then(|name| key_of(&name));
            let key = key.ok_or_else(|| format!("{flag} is no flag of an optimizer"))?;
            let value = match key.kind {
                Kind::Switch if value.is_some() => return Err(format!("{flag} takes no value")),
                Kind::Switch => "true",
                _ => value.or_else(|| words.next()).ok_or(format!("{flag} needs a value"))?,
            };
            if settings.get(key.flag).is_some() {
                return Err(format!("{flag} is given twice"));
            }
            settings.set_flag(key.flag, [value]);
        }
        let optimizer = optimizer(&settings).map_err(|error| error.to_string())?;
        Ok(RuleFor { names: names.to_owned(), optimizer })
    }
}

/// The factor of the learning rate of some variables: `NAMES=FACTOR`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RateFor {
    pub(super) names: String,
    pub(super) factor: f64,
}

impl FromStr for RateFor {
    type Err = String;

    fn from_str(text: &str) -> Result<RateFor, String> {
        let (names, factor) = text.rsplit_once('=').ok_or("no '=' after the names")?;
        let factor = factor.parse().map_err(|error| format!("{factor:?}: {error}"))?;
        Ok(RateFor { names: names.to_owned(), factor })
    }
}

#[cfg(test)]
mod tests {
    use super::super::keys::KEYS;
    use super::*;

    /// Returns the settings of flags: names with values, and switches.
    fn settings(line: &[&str]) -> Settings {
        let mut settings = Settings::default();
        for flag in line {
            let (flag, value) = flag.split_once('=').unwrap_or((flag, "true"));
            settings.set_flag(flag.trim_start_matches("--"), [value]);
        }
        settings
    }

    fn error(line: &[&str]) -> String {
        optimizer(&settings(line)).unwrap_err().to_string()
    }

    /// Returns the settings of a rule with a value for each of its hyperparameters.
    fn of_rule(rule: &str) -> Settings {
        let mut all = settings(&[&format!("--optimizer={rule}"), "--learning-rate=0.5"]);
        for flag in hyperparameters(rule).unwrap() {
            set(&mut all, flag);
        }
        all
    }

    fn set(settings: &mut Settings, flag: &str) {
        let value = match key_of(flag).unwrap().kind {
            Kind::Switch => "true",
            _ if flag == "learning-rate-power" => "-0.25",
            _ => "0.25",
        };
        settings.set_flag(flag, [value]);
    }

    #[test]
    fn the_hyperparameters_are_the_keys_of_optimizers() {
        let all: Vec<_> = KEYS.iter().filter(|key| key.table == "optimizer").collect();
        let beside =
            ["optimizer", "learning-rate", "schedule", "warm-up", "optimizer-for", "rate-for"];
        let flags = all.iter().map(|key| key.flag).filter(|flag| !beside.contains(flag));
        assert_eq!(flags.collect::<Vec<_>>(), HYPERPARAMETERS);
    }

    #[test]
    fn a_rule_accepts_only_its_own_hyperparameters() {
        for rule in OPTIMIZERS {
            let accepted = hyperparameters(rule).unwrap();
            for flag in HYPERPARAMETERS {
                let mut given = settings(&[&format!("--optimizer={rule}"), "--learning-rate=0.5"]);
                if accepted.contains(&"momentum") {
                    set(&mut given, "momentum");
                }
                set(&mut given, flag);
                let built = optimizer(&given);
                match accepted.contains(&flag) {
                    true => assert!(built.is_ok(), "{rule} {flag}: {built:?}"),
                    false => {
                        let error = built.unwrap_err().to_string();
                        let expected = format!("--optimizer {rule} does not take --{flag}, only");
                        assert!(error.contains(&expected), "{error}");
                    }
                }
            }
        }
        // A switch that is off changes nothing.
        assert!(optimizer(&settings(&["--centered=false"])).is_ok());
    }

    #[test]
    fn an_invalid_value_is_reported_with_its_flag() {
        for (line, expected) in [
            (&["--optimizer=adagard"][..], "--optimizer adagard: expected one of sgd, "),
            (&["--learning-rate=-1"], "--learning-rate -1: "),
            (&["--learning-rate=nan"], "--learning-rate nan: "),
            (&["--learning-rate=x"], "--learning-rate x: invalid float"),
            (&["--schedule=cosine:-1/5"], "--schedule cosine:-1/5: -1: "),
            (&["--schedule=cosine:0/0"], "--schedule cosine:0/0: 0: "),
            (&["--schedule=steps:9=0.5,3=0.1"], "--schedule steps:9=0.5,3=0.1: 3: steps must rise"),
            (&["--schedule=staircase:2/5"], "--schedule staircase:2/5: 2: "),
            (&["--optimizer=momentum"], "--optimizer momentum: it needs --momentum"),
            (&["--optimizer=nesterov"], "--optimizer nesterov: it needs --momentum"),
            (&["--optimizer=momentum", "--momentum=1"], "--momentum 1: "),
            (&["--optimizer=rmsprop", "--rho=1"], "--rho 1: "),
            (&["--optimizer=adam", "--beta1=2"], "--beta1 2: "),
            (&["--optimizer=ftrl", "--learning-rate-power=1"], "--learning-rate-power 1: "),
        ] {
            let error = error(line);
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn the_rate_follows_its_schedule() {
        assert_eq!(rate(&settings(&[])).unwrap(), 0.01.into());
        let line = settings(&["--learning-rate=0.5", "--schedule=cosine:0.1/100", "--warm-up=7"]);
        let expected = Schedule::cosine(0.5, 0.1, 100).warm_up(7);
        assert_eq!(rate(&line).unwrap(), expected);
    }

    #[test]
    fn every_hyperparameter_reaches_its_rule() {
        let said = |rule: &dyn Optimizer| format!("{rule:?}");
        let adam = Adam::new(0.5).betas(0.25, 0.25).epsilon(0.25).epsilon_after_correction();
        let adamw = AdamW::new(0.5).betas(0.25, 0.25).epsilon(0.25).weight_decay(0.25);
        let lamb = Lamb::new(0.5).betas(0.25, 0.25).epsilon(0.25).weight_decay(0.25);
        let rmsprop = RmsProp::new(0.5).decay(0.25).momentum(0.25).epsilon(0.25).centered();
        let ftrl = Ftrl::new(0.5).initial_accumulator(0.25).learning_rate_power(-0.25);
        let ftrl = ftrl.l1(0.25).l2(0.25).l2_shrinkage(0.25).beta(0.25);
        let momentum = |new: fn(Schedule, f64) -> Momentum| {
            said(&new(0.5.into(), 0.25).l2(0.25).weight_decay(0.25))
        };
        for (rule, expected) in [
            ("sgd", said(&Sgd::new(0.5).weight_decay(0.25))),
            ("momentum", momentum(Momentum::new)),
            ("nesterov", momentum(Momentum::nesterov)),
            ("adagrad", said(&Adagrad::new(0.5).initial_accumulator(0.25))),
            ("adadelta", said(&Adadelta::new(0.5).rho(0.25).epsilon(0.25))),
            ("rmsprop", said(&rmsprop)),
            ("adam", said(&adam)),
            ("lazy_adam", said(&adam.clone().lazy_with_row_counts())),
            ("adamw", said(&adamw.epsilon_after_correction())),
            ("lamb", said(&lamb)),
            ("ftrl", said(&ftrl)),
        ] {
            assert_eq!(said(&*optimizer(&of_rule(rule)).unwrap()), expected, "{rule}");
        }
        let lazy = optimizer(&settings(&["--optimizer=lazy_adam"])).unwrap();
        assert_eq!(lazy.kind(), "lazy_adam");
    }

    #[test]
    fn an_omitted_hyperparameter_has_the_default_of_the_rule() {
        let said = |rule: &dyn Optimizer| format!("{rule:?}");
        for (rule, expected) in [
            ("sgd", said(&Sgd::new(0.5))),
            ("adagrad", said(&Adagrad::new(0.5))),
            ("adadelta", said(&Adadelta::new(0.5))),
            ("rmsprop", said(&RmsProp::new(0.5))),
            ("adam", said(&Adam::new(0.5))),
            ("lazy_adam", said(&Adam::new(0.5).lazy())),
            ("adamw", said(&AdamW::new(0.5))),
            ("lamb", said(&Lamb::new(0.5))),
            ("ftrl", said(&Ftrl::new(0.5))),
        ] {
            let line = settings(&[&format!("--optimizer={rule}"), "--learning-rate=0.5"]);
            assert_eq!(said(&*optimizer(&line).unwrap()), expected, "{rule}");
        }
    }

    #[test]
    fn rules_and_rates_of_some_variables_are_texts() {
        let text =
            "emb/*=adagrad --learning-rate 0.25 --schedule=steps:9=0.5 --initial_accumulator 1";
        let RuleFor { names, optimizer } = text.parse().unwrap();
        let expected = Adagrad::new(Schedule::steps(0.25, [(9, 0.5)])).initial_accumulator(1.0);
        assert_eq!((&*names, format!("{optimizer:?}")), ("emb/*", format!("{expected:?}")));
        for (text, expected) in [
            ("emb", "no '=' after the names"),
            ("emb=", "no rule after the names"),
            ("emb=adagard", "--optimizer adagard: "),
            ("emb=momentum", "it needs --momentum"),
            ("emb=adam --epsilon -1", "--epsilon -1: "),
            ("emb=adagrad --rho 0.5", "--optimizer adagrad does not take --rho"),
            ("emb=adam --beta1", "--beta1 needs a value"),
            ("emb=adam --beta1 0.5 --beta1 0.6", "--beta1 is given twice"),
            ("emb=rmsprop --centered=1", "--centered takes no value"),
            ("emb=adam --shards 2", "--shards is no flag of an optimizer"),
            ("emb=adam x", "x is no flag"),
        ] {
            let error = text.parse::<RuleFor>().unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
        let factor = RateFor { names: "a=b*".to_owned(), factor: 0.5 };
        assert_eq!("a=b*=0.5".parse(), Ok(factor));
        for (text, expected) in [("0.5", "no '='"), ("emb=half", "\"half\"")] {
            let error = text.parse::<RateFor>().unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
