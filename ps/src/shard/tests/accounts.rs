//! The end of a random run: every push is settled and checked against the ledger.

use std::time::Duration;

use pushpull_common::protocol::message;

use super::actors::{check_whole, dense_bytes};
use super::model::Model;
use super::peers::f32s;
use super::world::ConnectionId;

impl Model {
    /// Lets every client settle its push, then checks the ledger.
    pub(super) fn settle_and_check(&mut self) {
        for round in 0.. {
            assert!(round < 400, "clients have not settled after 400 rounds: {:?}", self.actors);
            for index in 0..self.actors.len() {
                let actor = &mut self.actors[index];
                if actor.pending.is_some() || actor.line.is_none() {
                    self.act(index);
                } else if let Some(line) = actor.line {
                    self.world.say(line, message::Heartbeat {}.into());
                }
                self.listen(index);
            }
            self.world.work();
            if round % 4 == 0 {
                let alive: Vec<ConnectionId> =
                    self.actors.iter().filter_map(|actor| actor.line).collect();
                let lines: Vec<ConnectionId> = alive
                    .into_iter()
                    .filter(|line| !self.world.closed.contains(line))
                    .chain([self.reader])
                    .collect();
                self.world.pass(Duration::from_millis(50), &lines);
            }
            if self.actors.iter().all(|actor| actor.pending.is_none()) {
                break;
            }
        }
        self.world.work();
        let values = self.world.values(self.reader);
        let applied = check_whole(&values);
        let ledger = &f32s(&values)[dense_bytes() / 4..];
        for (entry, &count) in ledger.iter().enumerate() {
            let at_most = u8::from(entry < self.next_entry && !self.refused.contains(&entry));
            assert!(count == 0.0 || count == f32::from(at_most), "push {entry} counts {count}");
            let lost = count == 0.0 && self.acknowledged.contains(&entry);
            assert!(!lost, "push {entry} was acknowledged and is lost");
        }
        assert!(applied as usize <= self.acknowledged.len() + self.unknown.len());
        let metrics = self.world.metrics();
        assert_eq!(metrics.global_step, applied as u64);
        assert_eq!(metrics.gradients_applied, applied as u64);
        assert!(metrics.global_step <= self.last_step);
    }
}
