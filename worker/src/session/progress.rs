//! Reports the shards and replicas that operations wait for.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use pushpull_common::protocol::Refusal;

use super::link::{LinkStatus, ShardLink};
use super::requests::deadline_ms;
use super::{Op, OpId, OpKind, Session, SessionOutput};
use crate::error::{UnresponsiveShard, UnresponsiveShards};

/// The shortest wait that is asked of the step owner for a token. The owner checks its waits every
/// 50 ms.
const TOKEN_WAIT_MIN: Duration = Duration::from_millis(100);

impl Session {
    /// Returns the shards that an operation waits for, with the state of each.
    pub(super) fn awaited(&self, now: Instant, op: &Op) -> UnresponsiveShards {
        let all_links = || (0..self.links.len()).collect();
        let links: Vec<usize> = match &op.kind {
            OpKind::Open { shards } => {
                let down = |&&link: &&usize| self.links[link].status != LinkStatus::Up;
                shards.iter().filter(down).copied().collect()
            }
            OpKind::Join { links, .. } => {
                let down = |&link: &usize| self.links[link].status != LinkStatus::Up;
                let down: Vec<usize> = links.iter().copied().filter(down).collect();
                match down.is_empty() {
                    true => self.outdated(links.iter().copied()).collect(),
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
                        format!("has the values of step {older}, others have step {newest}");
                    silent.last = format!("{}; {values}", silent.last);
                }
            }
        }
        UnresponsiveShards(silent)
    }

    pub(super) fn silent(&self, now: Instant, index: usize) -> UnresponsiveShard {
        let link = &self.links[index];
        let last = match link.status {
            LinkStatus::Up if self.awaits_restore(index) => {
                "connected, has not been restored yet".to_owned()
            }
            LinkStatus::Up if link.is_unresponsive(now) => {
                let silence = now.saturating_duration_since(link.last_received);
                format!("connected, and unresponsive: no answer to a heartbeat for {silence:?}")
            }
            LinkStatus::Up if !link.blocked_reason.is_empty() => {
                format!("connected, waits: {}", link.blocked_reason)
            }
            LinkStatus::Up => {
                let silence = now.saturating_duration_since(link.last_received);
                format!("connected, silent for {silence:?}")
            }
            _ if link.last_error.is_empty() => "not connected yet".to_owned(),
            _ => link.last_error.clone(),
        };
        let address = self.config.addresses.get(&link.shard.task).cloned().unwrap_or_default();
        UnresponsiveShard { shard: link.shard, address, last }
    }

    /// Returns whether a shard is in an older restore epoch than others.
    fn awaits_restore(&self, index: usize) -> bool {
        let ready = (0..self.links.len()).filter(|&link| self.links[link].ready);
        self.outdated(ready).any(|outdated| outdated == index)
    }

    pub(super) fn report_progress(&mut self, now: Instant) {
        let Some(interval) = self.config.progress_interval else {
            return;
        };
        if self.ops.is_empty() {
            self.last_report = None;
            return;
        }
        let since = self.last_report.map(|reported| now.saturating_duration_since(reported));
        if since.is_some_and(|since| since < interval) {
            return;
        }
        self.last_report = Some(now);
        let silent = UnresponsiveShards(self.unresponsive_shards(now, None));
        if !silent.0.is_empty() {
            self.outputs.push_back(SessionOutput::Progress { silent });
        }
    }

    /// Returns the shards that block operations, and the shard of link `also`.
    fn unresponsive_shards(&self, now: Instant, also: Option<usize>) -> Vec<UnresponsiveShard> {
        let holds_up = |link: &ShardLink| {
            link.is_silent() || link.is_unresponsive(now) || !link.blocked_reason.is_empty()
        };
        let links = self.links.iter().enumerate();
        let silent = links.filter(|(index, link)| Some(*index) == also || holds_up(link));
        silent.map(|(index, _)| self.silent(now, index)).collect()
    }

    /// Returns how long the step owner may hold a token request before it answers with a refusal.
    /// In synchronous mode a token waits for other replicas, which only the owner knows, so the
    /// session asks once per progress interval. In asynchronous mode a repeated request would lose
    /// its place in the queue.
    pub(super) fn token_wait_ms(&self, now: Instant, deadline: Instant) -> u32 {
        let all = deadline_ms(now, deadline);
        match self.config.progress_interval.filter(|_| self.synchronous) {
            None => all,
            Some(interval) => {
                let report = interval.max(TOKEN_WAIT_MIN).as_millis();
                all.min(u32::try_from(report).unwrap_or(u32::MAX))
            }
        }
    }

    /// Handles a refused token request that asked for only a part of the caller's time. Reports the
    /// replicas it waits for and returns true if the session is to ask again.
    pub(super) fn continue_token_wait(
        &mut self,
        now: Instant,
        link: usize,
        refusal: &Refusal,
    ) -> bool {
        let asked_ms = self.tokens.partial_wait_ms();
        let (Refusal::Deadline { waited_ms, awaited }, Some(asked_ms)) = (refusal, asked_ms) else {
            return false;
        };
        // An earlier refusal is final: the servers' policy does not allow the wait.
        if *waited_ms < u64::from(asked_ms) {
            return false;
        }
        self.tokens.set_awaited(awaited.to_string());
        self.last_report = Some(now);
        let mut silent = self.unresponsive_shards(now, Some(link));
        let shard = self.links[link].shard;
        let owner = silent.iter_mut().filter(|silent| silent.shard == shard);
        owner.for_each(|owner| owner.last = format!("{}; {awaited}", owner.last));
        self.outputs.push_back(SessionOutput::Progress { silent: UnresponsiveShards(silent) });
        true
    }

    /// Replaces the wait time in the last of several refusals by that of the whole operation.
    pub(super) fn with_total_wait(&self, now: Instant, op: OpId, refusal: Refusal) -> Refusal {
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
