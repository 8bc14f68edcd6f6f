//! Flags with underscores, as classic trainers spell them: `--ps_hosts` for `--ps-hosts`.

use clap::Arg;

/// Lets a flag be spelled with underscores as well. The help shows the hyphens only.
pub(crate) fn accepts_underscores(flag: Arg) -> Arg {
    match flag.get_long().filter(|name| name.contains('-')).map(|name| name.replace('-', "_")) {
        Some(classic) => flag.alias(classic),
        None => flag,
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, FromArgMatches, Parser};

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        /// The address
        #[arg(long)]
        ps_host: String,
        /// The index
        #[arg(long, default_value_t = 0)]
        task_index: u32,
        /// The seed
        #[arg(long, default_value_t = 1)]
        seed: u32,
    }

    #[test]
    fn both_spellings_are_one_flag() {
        let command = || Line::command().mut_args(accepts_underscores);
        let parse = |flags: &[&str]| {
            let line = ["trainer"].iter().chain(flags);
            let matches = command().try_get_matches_from(line)?;
            Line::from_arg_matches(&matches)
        };
        for flags in [
            &["--ps_host", "a:1", "--task_index=3", "--seed=2"][..],
            &["--ps-host=a:1", "--task-index", "3", "--seed", "2"],
            &["--ps-host=a:1", "--task_index", "3", "--seed", "2"],
        ] {
            let line = parse(flags).unwrap();
            assert_eq!((&*line.ps_host, line.task_index, line.seed), ("a:1", 3, 2), "{flags:?}");
        }
        let twice = parse(&["--ps_host", "a:1", "--ps-host", "b:1"]).unwrap_err();
        assert!(twice.to_string().contains("--ps-host"), "{twice}");
        assert!(!command().render_help().to_string().contains("--ps_host"));
    }
}
