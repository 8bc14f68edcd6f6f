//! For whom an operation waits, and when that is told.

use std::collections::BTreeSet;
use std::time::Instant;

use super::link::Status;
use super::{Op, OpKind, Output, Session};
use crate::error::{Silent, SilentShards};

impl Session {
    /// The shards that an operation waits for, with what is known of each.
    pub(super) fn awaited(&self, now: Instant, op: &Op) -> SilentShards {
        let all_links = || (0..self.links.len()).collect();
        let links: Vec<usize> = match &op.kind {
            OpKind::Open { shards } => {
                let down = |&&link: &&usize| self.links[link].status != Status::Up;
                shards.iter().filter(down).copied().collect()
            }
            OpKind::Join { links, .. } => {
                let down = |&link: &usize| self.links[link].status != Status::Up;
                let down: Vec<usize> = links.iter().copied().filter(down).collect();
                match down.is_empty() {
                    true => self.behind(links.iter().copied()).collect(),
                    false => down,
                }
            }
            OpKind::Request(request) => vec![request.link],
            OpKind::Token => self.owner_link().into_iter().collect(),
            OpKind::Pull(pull) => BTreeSet::from_iter(pull.unanswered()).into_iter().collect(),
            OpKind::Push { sequence, .. } => match self.pushes.get(sequence) {
                Some(push) => self.awaited_by(push),
                None => all_links(),
            },
        };
        let mut silent: Vec<Silent> = links.iter().map(|&link| self.silent(now, link)).collect();
        if let OpKind::Pull(pull) = &op.kind {
            for (link, silent) in links.into_iter().zip(&mut silent) {
                if let Some((older, newest)) = pull.disagreement(link) {
                    let values =
                        format!("has the values of step {older}, others those of step {newest}");
                    silent.last = format!("{}; {values}", silent.last);
                }
            }
        }
        SilentShards(silent)
    }

    pub(super) fn silent(&self, now: Instant, index: usize) -> Silent {
        let link = &self.links[index];
        let last = match link.status {
            Status::Up if self.awaits_restore(index) => {
                "connected, has not been restored yet".to_owned()
            }
            Status::Up => {
                let silence = now.saturating_duration_since(link.last_heard);
                format!("connected, silent for {silence:?}")
            }
            _ if link.last_error.is_empty() => "not connected yet".to_owned(),
            _ => link.last_error.clone(),
        };
        let address = self.start.addresses.get(&link.shard.task).cloned().unwrap_or_default();
        Silent { shard: link.shard, address, last }
    }

    /// Whether a shard has values of an older restore epoch than others.
    fn awaits_restore(&self, index: usize) -> bool {
        let ready = (0..self.links.len()).filter(|&link| self.links[link].ready);
        self.behind(ready).any(|behind| behind == index)
    }

    pub(super) fn report_progress(&mut self, now: Instant) {
        let Some(interval) = self.start.progress_interval else {
            return;
        };
        if self.ops.is_empty() {
            self.reported = None;
            return;
        }
        let since = self.reported.map(|reported| now.saturating_duration_since(reported));
        if since.is_some_and(|since| since < interval) {
            return;
        }
        self.reported = Some(now);
        let down = (0..self.links.len()).filter(|&link| self.links[link].is_silent());
        let silent = SilentShards(down.map(|link| self.silent(now, link)).collect());
        if !silent.0.is_empty() {
            self.outputs.push_back(Output::Progress { silent });
        }
    }
}
