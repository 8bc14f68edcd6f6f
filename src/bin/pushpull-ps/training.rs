//! The flags that choose the update rule and the learning rate of each variable.

use std::str::FromStr;

use clap::{Args, CommandFactory, FromArgMatches, Parser};
use pushpull::{ClusterSpec, PsConfig, TaskId};

use super::rule::RuleOptions;
use super::shared::takes_hyphen;

/// Update rule of all variables, with exceptions for some.
#[derive(Debug, Args)]
#[command(next_help_heading = "Optimizer")]
pub(crate) struct TrainingOptions {
    #[command(flatten)]
    rule: RuleOptions,
    /// Update rule of some variables: 'emb/*=adagrad --learning-rate 0.1'
    #[arg(long, value_name = "NAMES=RULE")]
    optimizer_for: Vec<RuleFor>,
    /// Factor of the rate of some variables: 'bias*=0.5'
    #[arg(long, value_name = "NAMES=FACTOR")]
    rate_for: Vec<RateFor>,
}

/// The value of `--optimizer-for`.
#[derive(Clone, Debug)]
struct RuleFor {
    names: String,
    rule: RuleOptions,
}

/// The value of `--rate-for`.
#[derive(Clone, Debug, PartialEq)]
struct RateFor {
    names: String,
    factor: f64,
}

/// A command line with only the flags of one rule.
#[derive(Debug, Parser)]
struct RuleLine {
    #[command(flatten)]
    rule: RuleOptions,
}

impl TrainingOptions {
    /// Returns a configuration with these rules.
    ///
    /// # Errors
    /// Returns the text to print if a flag is given that its rule does not accept, or a value is
    /// out of range.
    pub(crate) fn config(&self, cluster: ClusterSpec, task: TaskId) -> Result<PsConfig, String> {
        let mut config = PsConfig::new(cluster, task, self.rule.optimizer()?);
        for RuleFor { names, rule } in &self.optimizer_for {
            config = config.optimizer_for(names, rule.optimizer()?);
        }
        for RateFor { names, factor } in &self.rate_for {
            config = config.rate_for(names, *factor);
        }
        Ok(config)
    }
}

impl FromStr for RuleFor {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (names, rule) = text.split_once('=').ok_or("no '=' after the names")?;
        let line = ["--optimizer-for", "--optimizer"].into_iter().chain(rule.split_whitespace());
        let line = RuleLine::command().mut_args(takes_hyphen).try_get_matches_from(line);
        let line = line.and_then(|line| RuleLine::from_arg_matches(&line)).map_err(|error| {
            // The usage is left out: it describes `RuleLine` and not the command line of the
            // daemon.
            let said = error.to_string();
            let said = said.lines().take_while(|line| !line.is_empty()).map(str::trim);
            said.collect::<Vec<_>>().join(" ").trim_start_matches("error: ").to_owned()
        })?;
        line.rule.optimizer()?;
        Ok(RuleFor { names: names.to_owned(), rule: line.rule })
    }
}

impl FromStr for RateFor {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (names, factor) = text.rsplit_once('=').ok_or("no '=' after the names")?;
        let factor = factor.parse().map_err(|error| format!("{factor:?}: {error}"))?;
        Ok(RateFor { names: names.to_owned(), factor })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Parser)]
    struct TrainingLine {
        #[command(flatten)]
        training: TrainingOptions,
    }

    fn config(line: &[&str]) -> Result<PsConfig, String> {
        let line = ["pushpull-ps"].iter().chain(line);
        let whole = TrainingLine::try_parse_from(line).map_err(|error| error.to_string())?;
        let cluster = ClusterSpec::builder().job("ps", ["a:1"]).build().unwrap();
        whole.training.config(cluster, TaskId::ps(0))
    }

    #[test]
    fn an_exception_has_its_own_rule_flags() {
        let line = [
            "--optimizer=adam",
            "--optimizer-for=emb/*=adagrad --learning-rate 0.25 --schedule steps:9=0.5,20=0.1",
            "--optimizer-for=emb/b=momentum --momentum 0.5",
            "--rate-for=emb/*=0.5",
        ];
        let said = format!("{:?}", config(&line).unwrap());
        for expected in ["emb/*", "Adagrad", "0.25", "emb/b", "Momentum", "Adam"] {
            assert!(said.contains(expected), "{expected} in {said}");
        }
        let factor = RateFor { names: "a=b*".to_owned(), factor: 0.5 };
        assert_eq!("a=b*=0.5".parse(), Ok(factor));
    }

    #[test]
    fn an_invalid_exception_is_reported() {
        let cases = [
            ("--optimizer-for=emb", "no '=' after the names"),
            ("--optimizer-for=emb=adagard", "adagard"),
            ("--optimizer-for=emb=momentum", "--momentum"),
            ("--optimizer-for=emb=adam --epsilon -1", "--epsilon -1: "),
            ("--optimizer-for=emb=adagrad --rho 0.5", "--optimizer adagrad does not take --rho"),
            ("--rate-for=0.5", "no '=' after the names"),
            ("--rate-for=emb=half", "\"half\""),
        ];
        for (flag, expected) in cases {
            let error = config(&[flag]).unwrap_err();
            assert!(error.contains(expected), "{flag}: {error}");
        }
    }
}
