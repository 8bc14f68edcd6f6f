//! Administration: tells the status of the training, and stops the task.

use pushpull_common::protocol::message::{Role, Stopping};

use crate::event::{AdminOrder, Event};
use crate::shard::Shard;
use crate::shard::output::ShardOutput;
use crate::shard::request::PeerRequest;

impl Shard {
    /// Answers with the status of the training, as this shard knows it, without the first members.
    pub(super) fn answer_status(&mut self, request: &PeerRequest, members_from: u32) {
        let status = self.status(request.since).to_wire(members_from as usize);
        request.answer(&mut self.out, status.into());
    }

    /// Stops the task for good.
    pub(super) fn stop(&mut self, request: &PeerRequest) {
        self.report_order(request, AdminOrder::Stop);
        request.answer(&mut self.out, Stopping {}.into());
        self.out.push(ShardOutput::Stop);
    }

    /// Reports the order of a request, if an administrator has given it.
    pub(super) fn report_order(&mut self, request: &PeerRequest, order: AdminOrder) {
        let connection = self.peers.connections.get(&request.connection);
        if let Some(by) = connection.filter(|by| by.role == Role::Admin {}) {
            let principal = by.principal.as_ref().map(|principal| principal.name.clone());
            let task = by.task.clone();
            let event = Event::AdminOrder { shard: self.id, order, task, principal };
            self.out.push(ShardOutput::Event(event));
        }
    }
}
