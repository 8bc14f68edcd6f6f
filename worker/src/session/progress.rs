//! For whom an operation waits, and when that is told.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use pushpull_common::protocol::Refusal;

use super::link::{Link, Status};
use super::requests::deadline_ms;
use super::{Op, OpId, OpKind, Output, Session};
use crate::error::{UnresponsiveShard, UnresponsiveShards};

/// The shortest time after which a step owner is asked for whom a token waits: it looks every 50 ms.
const SHORTEST_WAIT: Duration = Duration::from_millis(100);

impl Session {
    /// The shards that an operation waits for, with what is known of each.
    pub(super) fn awaited(&self, now: Instant, op: &Op) -> UnresponsiveShards {
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
        let mut silent: Vec<UnresponsiveShard> =
            links.iter().map(|&link| self.silent(now, link)).collect();
        if let (OpKind::Token, Some(awaited)) = (&op.kind, self.tokens.awaited()) {
            silent.iter_mut().for_each(|owner| owner.last = format!("{}; {awaited}", owner.last));
        }
        if let OpKind::Pull(pull) = &op.kind {
            for (link, silent) in links.into_iter().zip(&mut silent) {
                if let Some((older, newest)) = pull.disagreement(link) {
                    let values =
                        format!("has the values of step {older}, others those of step {newest}");
                    silent.last = format!("{}; {values}", silent.last);
                }
            }
        }
        UnresponsiveShards(silent)
    }

    pub(super) fn silent(&self, now: Instant, index: usize) -> UnresponsiveShard {
        let link = &self.links[index];
        let last = match link.status {
            Status::Up if self.awaits_restore(index) => {
                "connected, has not been restored yet".to_owned()
            }
            Status::Up if link.is_unresponsive(now) => {
                let silence = now.saturating_duration_since(link.last_heard);
                format!("connected, and unresponsive: no answer to a heartbeat for {silence:?}")
            }
            Status::Up if !link.trouble.is_empty() => format!("connected, waits: {}", link.trouble),
            Status::Up => {
                let silence = now.saturating_duration_since(link.last_heard);
                format!("connected, silent for {silence:?}")
            }
            _ if link.last_error.is_empty() => "not connected yet".to_owned(),
            _ => link.last_error.clone(),
        };
        let address = self.start.addresses.get(&link.shard.task).cloned().unwrap_or_default();
        UnresponsiveShard { shard: link.shard, address, last }
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
        let silent = UnresponsiveShards(self.who_is_silent(now, None));
        if !silent.0.is_empty() {
            self.outputs.push_back(Output::Progress { silent });
        }
    }

    /// The shards that hold operations up, and this one, by its link, if it is none of them.
    fn who_is_silent(&self, now: Instant, also: Option<usize>) -> Vec<UnresponsiveShard> {
        let holds_up =
            |link: &Link| link.is_silent() || link.is_unresponsive(now) || !link.trouble.is_empty();
        let links = self.links.iter().enumerate();
        let silent = links.filter(|(index, link)| Some(*index) == also || holds_up(link));
        silent.map(|(index, _)| self.silent(now, index)).collect()
    }

    /// How long the step owner may let a request for a token wait before it says for whom. In synchronous mode
    /// that is for others, whom only the owner knows: it is asked once for each report of progress. In
    /// asynchronous mode whoever asked again would lose its turn.
    pub(super) fn token_wait_ms(&self, now: Instant, deadline: Instant) -> u32 {
        let all = deadline_ms(now, deadline);
        match self.start.progress_interval.filter(|_| self.synchronous) {
            None => all,
            Some(interval) => {
                let report = interval.max(SHORTEST_WAIT).as_millis();
                all.min(u32::try_from(report).unwrap_or(u32::MAX))
            }
        }
    }

    /// A request for a token was refused. Whether that only says for whom it waits, because the request was to
    /// wait for a part of the time that its caller has: it is told, and asked again.
    pub(super) fn token_goes_on(&mut self, now: Instant, link: usize, refusal: &Refusal) -> bool {
        let asked_ms = self.tokens.asked_in_part();
        let (Refusal::Deadline { waited_ms, awaited }, Some(asked_ms)) = (refusal, asked_ms) else {
            return false;
        };
        // One that comes sooner is final: the servers' policy says that nobody is to wait.
        if *waited_ms < u64::from(asked_ms) {
            return false;
        }
        self.tokens.wait_for(awaited.to_string());
        self.reported = Some(now);
        let mut silent = self.who_is_silent(now, Some(link));
        let shard = self.links[link].shard;
        let owner = silent.iter_mut().filter(|silent| silent.shard == shard);
        owner.for_each(|owner| owner.last = format!("{}; {awaited}", owner.last));
        self.outputs.push_back(Output::Progress { silent: UnresponsiveShards(silent) });
        true
    }

    /// The refusal of the last of several requests for a token, as that of the operation: it has waited for all
    /// of them.
    pub(super) fn of_the_whole_wait(&self, now: Instant, op: OpId, refusal: Refusal) -> Refusal {
        match (refusal, self.tokens.awaited(), self.ops.get(&op)) {
            (Refusal::Deadline { awaited, .. }, Some(_), Some(op)) => {
                let waited = now.saturating_duration_since(op.since).as_millis();
                let waited_ms = u64::try_from(waited).unwrap_or(u64::MAX);
                Refusal::Deadline { waited_ms, awaited }
            }
            (refusal, ..) => refusal,
        }
    }
}
