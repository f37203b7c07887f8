/* SPDX-License-Identifier: Apache-2.0
 *
 * Tells the service manager, if there is one, what the daemon is doing.
 */
#ifndef EXPERTD_SERVER_NOTIFY_H
#define EXPERTD_SERVER_NOTIFY_H

/* One datagram to NOTIFY_SOCKET, such as "READY=1"; nothing happens without that variable, nor when it can't be sent. */
void notify_manager(const char *state);

#endif
